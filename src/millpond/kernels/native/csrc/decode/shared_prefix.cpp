// Attention of many sequences to entries that they share, which are read once for all of them: the first of the two
// phases of ChunkAttention.
//
// The thread that finishes the last range of some rows puts all ranges together in order.
#include <cmath>

#include "common/threads.hpp"
#include "decode/shared_prefix_block.hpp"
#include "decode/shared_run.hpp"

namespace mp {

template <class T>
void SharedRun::attend_as(int unit, char* room) const {
  const SharedCall<T> call(a_);
  const SharedRoom<T> arrays(call, together_, reinterpret_cast<uintptr_t>(room));
  const int of = part(unit), begin = unit % ranges_ * range_;
  const Found to = found(of, unit % ranges_);
  SharedBlock<T>(call, arrays, to, head(of), first(of), rows(of))
      .attend(begin, std::min(begin + range_, int(a_.lens[head(of)])));
}

void SharedRun::attend(int unit, char* room) const {
#if defined(MP_PAIRED_PRODUCTS)
  if (a_.q_dtype == BF16) return attend_as<bf16>(unit, room);
#endif
  attend_as<float>(unit, room);
}

int64_t SharedRun::room_bytes() const {
#if defined(MP_PAIRED_PRODUCTS)
  if (a_.q_dtype == BF16) return SharedRoom<bf16>::bytes(SharedCall<bf16>(a_), together_);
#endif
  return SharedRoom<float>::bytes(SharedCall<float>(a_), together_);
}

namespace {

class Shared {
 public:
  explicit Shared(const AttendArgs& args) : run_(args), a_(args) {}
  int run();

 private:
  void reduce(int part);
  void add_found(void* out, float factor, float* sum) const;

  SharedRun run_;
  const AttendArgs& a_;
};

// The ranges of the rows of a part, and what these found elsewhere, put together in the first range's place.
void Shared::reduce(int part) {
  const int head = run_.head(part), used = run_.used(head), pad = run_.value_pad(), group = run_.group();
  for (int i = 0; i < run_.rows(part); ++i) {
    const int row = run_.first(part) + i;
    const int64_t result = a_.members[row / group] * a_.n_heads + int64_t(head) * group + row % group;
    float &lse = a_.lse[result], top = lse * LOG2_E;
    for (int j = 0; j < used; ++j) top = std::max(top, run_.found(part, j).top[i]);
    if (used == 0 || top <= NOTHING) continue;
    const float before = exp2(splat(lse * LOG2_E - top))[0];
    float total = before;
    for (int j = 0; j < used; ++j) {
      const Found f = run_.found(part, j);
      total += exp2(splat(f.top[i] - top))[0] * f.total[i];
    }
    float* sum = run_.found(part, 0).out + int64_t(i) * pad;
    for (int j = 0; j < used; ++j) {
      const Found f = run_.found(part, j);
      const float factor = exp2(splat(f.top[i] - top))[0] / total, *from = f.out + int64_t(i) * pad;
      for (int d = 0; d < pad; d += W) store(sum + d, (j > 0 ? load(sum + d) : vf{}) + load(from + d) * factor);
    }
    add_found(static_cast<char*>(a_.out) + result * a_.pool.value_dim * dtype_bytes(a_.out_dtype), before / total, sum);
    lse = (top + std::log2(total)) / LOG2_E;
  }
}

// sum += factor * what stands at `out`, which it replaces.
void Shared::add_found(void* out, float factor, float* sum) const {
  constexpr int PART = 64;
  const int dim = int(a_.pool.value_dim);
  float part[PART];
  for (int d = 0; d < dim && factor != 0; d += PART) {
    const int n = std::min(PART, dim - d);
    widen(part, offset(out, a_.out_dtype, d), a_.out_dtype, n);
    for (int i = 0; i < n; ++i) sum[d + i] += part[i] * factor;
  }
  narrow(out, a_.out_dtype, sum, dim);
}

int Shared::run() {
  const int units = run_.units(), parts = run_.parts();
  const double worth = 1 + run_.work() / SHARED_WORK_PER_THREAD;
  const int threads = int(std::min({double(a_.n_threads), double(units), worth}));
  const int64_t found_bytes = run_.found_bytes(), room_bytes = run_.room_bytes();
  static thread_local Workspace workspace;
  char* memory = workspace.get(found_bytes + threads * room_bytes + 4 * parts);
  if (memory == nullptr) return 1;
  run_.use(memory);
  auto* left = reinterpret_cast<std::atomic<int>*>(memory + found_bytes + threads * room_bytes);  // ranges to go
  for (int i = 0; i < parts; ++i) new (left + i) std::atomic<int>(run_.ranges());
  std::atomic<int> next{0};
  auto body = [&](int thread) {
    char* room = memory + found_bytes + thread * room_bytes;
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < units;) {
      run_.attend(i, room);
      if (left[run_.part(i)].fetch_sub(1, std::memory_order_acq_rel) == 1) reduce(run_.part(i));
    }
  };
  parallel(threads, body);
  return 0;
}

}  // namespace
}  // namespace mp

// Each member's out and lse become those over the shared entries and what it found before.
extern "C" __attribute__((visibility("default"))) int mp_attend(const mp::AttendArgs* args) {
  return mp::Shared(*args).run();
}
