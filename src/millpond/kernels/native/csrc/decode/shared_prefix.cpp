// Attention of many sequences to entries that they share, which are read once for all of them: the first of the two
// phases of ChunkAttention.
//
// A unit of work is a range of entries of one KV head with some of its rows. How a call is cut depends on its shape
// alone, and the thread that finishes the last range of some rows puts all ranges together in order, so results do not
// depend on the threads.
#include <cmath>

#include "common/threads.hpp"
#include "decode/shared_prefix_block.hpp"

namespace mp {
namespace {

constexpr int SHORTEST = 512;                      // entries of a range, at least, unless there are fewer
constexpr int UNITS = 128;                         // of a call, about: enough for many threads
constexpr double SHARED_WORK_PER_THREAD = 1 << 20;  // products that a thread is worth waking for

template <class T>
class Shared {
 public:
  explicit Shared(const AttendArgs& args) : c_(args) {}
  int run();

 private:
  void plan();
  void unit(int index, const SharedRoom<T>& room);
  void reduce(int head, int first, int n, int index);
  void add_found(void* out, float factor, float* sum) const;
  Found found(int index) const {
    return Found(together_, c_.value_pad, found_ + index * Found::bytes(together_, c_.value_pad));
  }

  SharedCall<T> c_;
  int longest_ = 0, together_ = 0, parts_ = 1, ranges_ = 1, range_ = 1;  // together_: rows of a unit, padded
  char* found_ = nullptr;
  std::atomic<int>* left_ = nullptr;  // (Hkv * parts,): ranges to go
};

template <class T>
void Shared<T>::plan() {
  const int heads = int(c_.a.n_kv_heads);
  for (int h = 0; h < heads; ++h) longest_ = std::max(longest_, int(c_.a.lens[h]));
  parts_ = (c_.rows + MOST_ROWS - 1) / MOST_ROWS;
  together_ = int(round_up(std::min(c_.rows, MOST_ROWS), BLOCK_ROWS));
  const int most = std::max(1, UNITS / (heads * parts_));
  range_ = int(round_up(std::max(SHORTEST, (longest_ + most - 1) / most), CHUNK_KEYS));
  ranges_ = std::max(1, (longest_ + range_ - 1) / range_);
}

template <class T>
void Shared<T>::unit(int index, const SharedRoom<T>& room) {
  const int part = index / ranges_, head = part / parts_, first = part % parts_ * MOST_ROWS;
  const int n = std::min(MOST_ROWS, c_.rows - first), begin = index % ranges_ * range_;
  SharedBlock<T>(c_, room, found(index), head, first, n).attend(begin, std::min(begin + range_, int(c_.a.lens[head])));
  if (left_[part].fetch_sub(1, std::memory_order_acq_rel) == 1) reduce(head, first, n, part * ranges_);
}

// The ranges of some rows, and what these found elsewhere, put together in the first range's place. `index`: of the unit
// of that range.
template <class T>
void Shared<T>::reduce(int head, int first, int n, int index) {
  const int used = (int(c_.a.lens[head]) + range_ - 1) / range_;
  for (int row = 0; row < n; ++row) {
    const int64_t result = c_.result(head, first + row);
    float &lse = c_.a.lse[result], top = lse * LOG2_E;
    for (int i = 0; i < used; ++i) top = std::max(top, found(index + i).top[row]);
    if (used == 0 || top <= NOTHING) continue;
    const float before = exp2(splat(lse * LOG2_E - top))[0];
    float total = before;
    for (int i = 0; i < used; ++i) total += exp2(splat(found(index + i).top[row] - top))[0] * found(index + i).total[row];
    float* sum = found(index).out + int64_t(row) * c_.value_pad;
    for (int i = 0; i < used; ++i) {
      const Found f = found(index + i);
      const float factor = exp2(splat(f.top[row] - top))[0] / total, *from = f.out + int64_t(row) * c_.value_pad;
      for (int d = 0; d < c_.value_pad; d += W) store(sum + d, (i > 0 ? load(sum + d) : vf{}) + load(from + d) * factor);
    }
    char* out = static_cast<char*>(c_.a.out) + result * c_.value_dim * dtype_bytes(c_.a.out_dtype);
    add_found(out, before / total, sum);
    lse = (top + std::log2(total)) / LOG2_E;
  }
}

// sum += factor * what stands at `out`, which it replaces.
template <class T>
void Shared<T>::add_found(void* out, float factor, float* sum) const {
  constexpr int PART = 64;
  float part[PART];
  for (int d = 0; d < c_.value_dim && factor != 0; d += PART) {
    const int n = std::min(PART, c_.value_dim - d);
    widen(part, offset(out, c_.a.out_dtype, d), c_.a.out_dtype, n);
    for (int i = 0; i < n; ++i) sum[d + i] += part[i] * factor;
  }
  narrow(out, c_.a.out_dtype, sum, c_.value_dim);
}

template <class T>
int Shared<T>::run() {
  plan();
  const int units = int(c_.a.n_kv_heads) * parts_ * ranges_, counters = int(c_.a.n_kv_heads) * parts_;
  const double work = double(c_.rows) * double(c_.a.n_kv_heads) * double(longest_) * (c_.key_dim + c_.value_dim);
  const int threads = int(std::min({double(c_.a.n_threads), double(units), 1 + work / SHARED_WORK_PER_THREAD}));
  const int64_t found_bytes = round_up(units * Found::bytes(together_, c_.value_pad), 4096);
  const int64_t room_bytes = SharedRoom<T>::bytes(c_, together_);
  static thread_local Workspace workspace;
  char* memory = workspace.get(found_bytes + threads * room_bytes + 4 * counters);
  if (memory == nullptr) return 1;
  found_ = memory;
  left_ = reinterpret_cast<std::atomic<int>*>(memory + found_bytes + threads * room_bytes);
  for (int i = 0; i < counters; ++i) new (left_ + i) std::atomic<int>(ranges_);
  std::atomic<int> next{0};
  auto body = [&](int thread) {
    const SharedRoom<T> room(c_, together_, reinterpret_cast<uintptr_t>(memory + found_bytes + thread * room_bytes));
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < units;) unit(i, room);
  };
  parallel(threads, body);
  return 0;
}

}  // namespace
}  // namespace mp

// Each member's out and lse become those over the shared entries and what it found before.
extern "C" __attribute__((visibility("default"))) int mp_attend(const mp::AttendArgs* args) {
#if defined(MP_PAIRED_PRODUCTS)
  if (args->q_dtype == mp::BF16) return mp::Shared<mp::bf16>(*args).run();
#endif
  return mp::Shared<float>(*args).run();
}
