// Attention of many new queries of one sequence, with the column sums of its probabilities.
//
// The rows of a KV head are cut into blocks, and every STRANDS-th block makes a strand: the unit of work, about as long
// as any other of its head. One thread does the blocks of a strand in order and adds to the strand's own column sums, so
// results do not depend on the threads.
#include "common/threads.hpp"
#include "prefill/query_block.hpp"

namespace mp {
namespace {

constexpr int ROWS = 48;                           // per block, at most: whole tiles
constexpr int STEPS = 16;                          // blocks of a prompt, at least: little runs above the diagonal
constexpr int STRANDS = 16;                        // per KV head, at most
constexpr int64_t HELD_BYTES = 768 * 1024;         // of weights per block: most of an L2 cache
constexpr int64_t PACKED_BYTES = 8 * 1024 * 1024;  // KV heads are packed together up to this
constexpr double WORK_PER_THREAD = 1 << 20;        // products that a thread is worth waking for

template <class T>
class Prefill {
 public:
  explicit Prefill(const PrefillArgs& args) : p_(args) {}
  int run();

 private:
  void plan();
  void pack(int heads, int from);
  void attend(int heads, int from);
  void strand(int head, const Packed<T>& packed, int index, const Room<T>& room, float* sums);
  void reduce(int head, const float* sums);

  Packed<T> packed(int i) const { return Packed<T>(p_, packs_ + i * Packed<T>::bytes(p_)); }
  Room<T> room(int thread) const {
    return Room<T>(p_, queries_ * p_.group, held_, reinterpret_cast<uintptr_t>(scratch_ + thread * scratch_bytes_));
  }
  float* sums(int i) const { return sums_ + int64_t(i) * strands_ * p_.columns; }

  Prompt<T> p_;
  int queries_ = 1, blocks_ = 1, strands_ = 1, held_ = 1, threads_ = 1;
  int64_t scratch_bytes_ = 0;
  char *packs_ = nullptr, *scratch_ = nullptr;
  float* sums_ = nullptr;
};

template <class T>
void Prefill<T>::plan() {
  const bool holds = p_.a.sums != nullptr;
  int64_t rows = std::min<int64_t>(ROWS, p_.a.n_columns / STEPS * p_.group);
  if (holds) rows = std::min(rows, std::max<int64_t>(ROWS / 2, HELD_BYTES / (4 * p_.columns)));
  rows = std::max(rows / TILE_ROWS, int64_t(1)) * TILE_ROWS;
  queries_ = int(std::max<int64_t>(1, std::min<int64_t>(rows / p_.group, p_.a.n_queries)));
  blocks_ = int((p_.a.n_queries + queries_ - 1) / queries_);
  strands_ = std::min(STRANDS, blocks_);
  held_ = holds ? p_.chunks : 1;
  const double pairs = double(p_.a.n_heads) * double(p_.a.n_queries) * double(p_.a.n_columns);
  const double work = pairs * double(p_.key_dim + p_.value_dim);
  threads_ = int(std::min<double>(double(p_.a.n_threads), 1 + work / WORK_PER_THREAD));
}

template <class T>
void Prefill<T>::pack(int heads, int from) {
  std::atomic<int> next{0};
  auto body = [&](int thread) {
    T* rows = reinterpret_cast<T*>(scratch_ + thread * scratch_bytes_);
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < heads * p_.chunks;)
      pack_chunk(p_, packed(i / p_.chunks), from + i / p_.chunks, i % p_.chunks, rows);
  };
  parallel(threads_, body);
}

template <class T>
void Prefill<T>::strand(int head, const Packed<T>& packed, int index, const Room<T>& room, float* sums) {
  if (p_.a.sums != nullptr) std::fill(sums, sums + p_.columns, 0.0f);
  for (int b = index; b < blocks_; b += strands_) {
    const int first = b * queries_;
    Block<T> block(p_, packed, room, head, first, std::min(queries_, int(p_.a.n_queries) - first));
    block.attend();
    block.finish();
    if (p_.a.sums != nullptr) block.add_columns(sums);
  }
}

template <class T>
void Prefill<T>::attend(int heads, int from) {
  std::atomic<int> next{0};
  auto body = [&](int thread) {
    const Room<T> own = room(thread);
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < heads * strands_;) {
      const int head = i / strands_, index = i % strands_;
      strand(from + head, packed(head), index, own, sums(head) + int64_t(index) * p_.columns);
    }
  };
  parallel(threads_, body);
}

template <class T>
void Prefill<T>::reduce(int head, const float* sums) {
  const float share = p_.a.reduce == MEAN ? 1.0f / float(p_.group) : 1.0f;
  const int64_t n = p_.a.n_columns;
  float* out = p_.a.sums + head * n;
  std::fill(out, out + n, 0.0f);
  for (int s = 0; s < strands_; ++s, sums += p_.columns)
    for (int64_t j = 0; j < n; ++j) out[j] += sums[j];
  for (int64_t j = 0; j < n; ++j) out[j] *= share;
}

template <class T>
int Prefill<T>::run() {
  plan();
  const int n = int(p_.a.n_kv_heads);
  const int together = int(std::max<int64_t>(1, std::min<int64_t>(n, PACKED_BYTES / Packed<T>::bytes(p_))));
  const int64_t rows = int64_t(sizeof(T)) * std::max(TILE * p_.key_pad, 2 * p_.value_pad);
  scratch_bytes_ = std::max(Room<T>::bytes(p_, queries_ * p_.group, held_), round_up(rows, 4096));
  const int64_t packs = round_up(together * Packed<T>::bytes(p_), 4096);
  const int64_t sums = p_.a.sums != nullptr ? int64_t(together) * strands_ * p_.columns * 4 : 0;
  static thread_local Workspace workspace;
  packs_ = workspace.get(packs + threads_ * scratch_bytes_ + sums);
  if (packs_ == nullptr) return 1;
  scratch_ = packs_ + packs;
  sums_ = reinterpret_cast<float*>(scratch_ + threads_ * scratch_bytes_);
  for (int from = 0; from < n; from += together) {
    const int heads = std::min(together, n - from);
    pack(heads, from);
    attend(heads, from);
    for (int i = 0; p_.a.sums != nullptr && i < heads; ++i) reduce(from + i, this->sums(i));
  }
  return 0;
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_prefill(const mp::PrefillArgs* args) {
#if defined(MP_PAIRED_PRODUCTS)
  if (args->q_dtype == mp::BF16) return mp::Prefill<mp::bf16>(*args).run();
#endif
  return mp::Prefill<float>(*args).run();
}
