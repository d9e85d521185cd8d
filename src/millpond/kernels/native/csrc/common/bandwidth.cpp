// How fast memory can be read: the yardstick beside which the kernels are measured.
#include "common/simd.hpp"
#include "common/threads.hpp"

namespace mp {
namespace {

constexpr int64_t BLOCK = 1 << 20;  // bytes per work item

float read_block(const char* p, int64_t bytes) {
  vf sums[8] = {};
  for (int64_t i = 0; i + 8 * W * 4 <= bytes; i += 8 * W * 4)
    for (int j = 0; j < 8; ++j) {
      const vf v = load(reinterpret_cast<const float*>(p + i) + j * W);
      sums[j] = (vf)((vi)sums[j] ^ (vi)v);
    }
  vi all{};
  for (vf s : sums) all ^= (vi)s;
  float out;
  const vi folded = all;
  std::memcpy(&out, &folded, 4);
  return out;
}

}  // namespace
}  // namespace mp

// Read all bytes once on n_threads threads. The result only keeps the compiler from leaving the work out.
extern "C" __attribute__((visibility("default"))) int mp_read_bandwidth(const void* memory, int64_t bytes, int n_threads) {
  using namespace mp;
  std::atomic<int> odd{0};
  auto body = [&](int64_t i) {
    const int64_t begin = i * BLOCK, size = begin + BLOCK < bytes ? BLOCK : bytes - begin;
    if (read_block(static_cast<const char*>(memory) + begin, size) == 1.0f) odd.fetch_add(1);
  };
  parallel_for((bytes + BLOCK - 1) / BLOCK, n_threads, body);
  return odd.load();
}
