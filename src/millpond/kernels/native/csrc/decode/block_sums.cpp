// Attention of one query of each sequence as sums beside the keys, which lie in blocks in an order of their own.
#include "common/softmax.hpp"
#include "common/pages.hpp"
#include "common/threads.hpp"
#include "common/workspace.hpp"

namespace mp {
namespace {

constexpr int TOGETHER = 4;                       // query heads that meet a key while it is in registers
constexpr double WORK_PER_THREAD = 1 << 22;       // products that a thread is worth waking for: 0.1 ms

// W tokens at one channel, or at a pair of channels.
template <class T>
struct Column {
  static constexpr int CHANNELS = 1;
  static MP_INLINE void read(const T* at, vf* out) { out[0] = load(at); }
};
struct BFloatPairs {
  static constexpr int CHANNELS = 2;
  static MP_INLINE void read(const bf16* at, vf* out) {
    vu pair;
    std::memcpy(&pair, at, sizeof pair);
    out[0] = (vf)(pair << 16), out[1] = (vf)(pair & 0xffff0000u);
  }
};

class Sums {
 public:
  explicit Sums(const BlockSumsArgs& a) : a_(a), group_(int(a.n_heads / a.n_kv_heads)), dim_(int(a.dim)) {}

  // Floats of work space for `longest` entries.
  int64_t floats(int64_t longest) const { return (group_ + 2) * round_up(dim_, 16) + (group_ + 1) * width(longest); }
  void add(int64_t s, int64_t head, float* room) const;

 private:
  int64_t width(int64_t n) const { return round_up(round_up(n, a_.block), 16); }
  template <int H>
  void products(const char* keys, const float* q, float* logits, int64_t row, float* spare) const;
  template <int H, class T, class C>
  void by_tokens(const T* keys, const float* q, float* logits, int64_t row) const;
  template <int H, class T>
  void by_channels(const T* keys, const float* q, float* logits, int64_t row, float* spare) const;
  void gather(float* shares, float* logits, int64_t n, int64_t width, int64_t head) const;

  const BlockSumsArgs& a_;
  const int group_, dim_;
};

// Products of H queries with the keys of a block to `logits`, rows of `row` floats; W tokens at a time.
template <int H, class T, class C>
void Sums::by_tokens(const T* keys, const float* q, float* logits, int64_t row) const {
  const int64_t q_row = round_up(dim_, 16);
  for (int t = 0; t < a_.block; t += W) {
    vf acc[H] = {};
    for (int c = 0; c < dim_; c += C::CHANNELS) {
      vf k[C::CHANNELS];
      C::read(keys + a_.row_at[t] + a_.column_at[c], k);
      for (int i = 0; i < C::CHANNELS; ++i)
        for (int h = 0; h < H; ++h) acc[h] += k[i] * q[h * q_row + c + i];
    }
    for (int h = 0; h < H; ++h) store(logits + h * row + t, acc[h]);
  }
}

// The same of keys in any order; a token at a time.
template <int H, class T>
void Sums::by_channels(const T* keys, const float* q, float* logits, int64_t row, float* spare) const {
  const int64_t padded = round_up(dim_, 16);
  T* token = reinterpret_cast<T*>(spare + padded);
  std::fill(spare, spare + padded, 0.0f);
  for (int t = 0; t < a_.block; ++t) {
    for (int c = 0; c < dim_; ++c) token[c] = keys[a_.row_at[t] + a_.column_at[c]];
    widen(spare, token, a_.k_dtype, dim_);
    vf acc[H] = {};
    for (int64_t c = 0; c < padded; c += W)
      for (int h = 0; h < H; ++h) acc[h] += load(spare + c) * load(q + h * padded + c);
    for (int h = 0; h < H; ++h) logits[h * row + t] = sum(acc[h]);
  }
}

template <int H>
void Sums::products(const char* keys, const float* q, float* logits, int64_t row, float* spare) const {
  const auto* floats = reinterpret_cast<const float*>(keys);
  const auto* brain = reinterpret_cast<const bf16*>(keys);
  const auto* half = reinterpret_cast<const f16*>(keys);
  if (a_.order == TOKENS_TOGETHER && a_.k_dtype == F32)
    by_tokens<H, float, Column<float>>(floats, q, logits, row);
  else if (a_.order == TOKENS_TOGETHER && a_.k_dtype == BF16)
    by_tokens<H, bf16, Column<bf16>>(brain, q, logits, row);
  else if (a_.order == TOKENS_TOGETHER)
    by_tokens<H, f16, Column<f16>>(half, q, logits, row);
  else if (a_.order == PAIRS_TOGETHER && a_.k_dtype == BF16)
    by_tokens<H, bf16, BFloatPairs>(brain, q, logits, row);
  else if (a_.k_dtype == F32)
    by_channels<H>(floats, q, logits, row, spare);
  else
    by_channels<H>(half, q, logits, row, spare);
}

// Logits of the group's heads to the shares (width,) that the entries take.
void Sums::gather(float* shares, float* logits, int64_t n, int64_t width, int64_t head) const {
  std::fill(shares, shares + width, 0.0f);
  const int64_t whole = round_up(n, W);
  for (int h = 0; h < group_; ++h) {
    float* x = logits + h * width;
    settle_logits(x, int(whole), float(a_.scale), float(a_.softcap), nullptr, nullptr, Sight(0, 0));
    std::fill(x + n, x + whole, -__builtin_inff());
    vf best = splat(NOTHING), total = vf{};
    for (int64_t i = 0; i < whole; i += W) best = vmax(load(x + i), best);
    float top = max(best), sink = 0;
    if (a_.sink_logits != nullptr) {
      sink = a_.sink_logits[head * group_ + h] * LOG2_E;
      top = std::max(top, sink);
    }
    for (int64_t i = 0; i < whole; i += W) {
      const vf weight = exp2(load(x + i) - splat(top));
      total += weight;
      store(x + i, weight);
    }
    float sum_of = sum(total);
    if (a_.sink_logits != nullptr) sum_of += exp2(splat(sink - top))[0];
    const vf factor = splat((a_.reduce == MEAN ? 1.0f / float(group_) : 1.0f) / sum_of);
    for (int64_t i = 0; i < whole; i += W) {
      const vf share = load(x + i) * factor, before = load(shares + i);
      store(shares + i, a_.reduce == MAX ? vmax(share, before) : before + share);
    }
  }
}

// One sequence and KV head.
void Sums::add(int64_t s, int64_t head, float* room) const {
  const int64_t n = a_.lens[s], n_blocks = (n + a_.block - 1) / a_.block, row = width(n), q_row = round_up(dim_, 16);
  if (n <= 0) return;
  float *q = room, *spare = q + group_ * q_row, *shares = spare + 2 * q_row, *logits = shares + row;
  std::fill(q, spare, 0.0f);
  for (int h = 0; h < group_; ++h)
    widen(q + h * q_row, offset(a_.q, a_.q_dtype, s * a_.q_seq + (head * group_ + h) * a_.q_head), a_.q_dtype, dim_);
  const int32_t* table = a_.table + s * a_.table_row;
  for (int64_t b = 0; b < n_blocks; ++b) {
    const void* at = offset(a_.keys, a_.k_dtype, table[b] * a_.k_block + head * a_.k_head);
    const char* keys = static_cast<const char*>(at);
    float* to = logits + b * a_.block;
    int h = 0;
    for (; h + TOGETHER <= group_; h += TOGETHER) products<TOGETHER>(keys, q + h * q_row, to + h * row, row, spare);
    if (group_ - h == 3) products<3>(keys, q + h * q_row, to + h * row, row, spare);
    if (group_ - h == 2) products<2>(keys, q + h * q_row, to + h * row, row, spare);
    if (group_ - h == 1) products<1>(keys, q + h * q_row, to + h * row, row, spare);
  }
  gather(shares, logits, n, row, head);
  const float decay = float(a_.decay);
  for (int64_t b = 0; b < n_blocks; ++b) {
    float* to = a_.sums + (table[b] * a_.n_kv_heads + head) * a_.block;
    const float* share = shares + b * a_.block;
    const int64_t stored = std::min(a_.block, n - 1 - b * a_.block);  // the newest entry has gathered nothing yet
    for (int64_t t = 0; t < stored; ++t) to[t] = to[t] * decay + share[t];
    if (stored < a_.block) to[stored] = share[stored];
  }
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_block_sums(const mp::BlockSumsArgs* args) {
  using namespace mp;
  const Sums sums(*args);
  int64_t longest = 0, all = 0;
  for (int64_t s = 0; s < args->n_seq; ++s) {
    longest = std::max<int64_t>(longest, args->lens[s]);
    all += args->lens[s];
  }
  const int64_t items = args->n_seq * args->n_kv_heads;
  const double work = double(all) * double(args->n_heads) * double(args->dim);
  const double useful = std::min<double>(double(args->n_threads), 1 + work / WORK_PER_THREAD);
  const int threads = int(std::max<int64_t>(1, std::min<int64_t>(int64_t(useful), items)));
  const int64_t floats = round_up(sums.floats(longest), 16);
  static thread_local Workspace workspace;
  char* memory = workspace.get(threads * floats * 4);
  if (memory == nullptr) return 1;
  std::atomic<int64_t> next{0};
  auto body = [&](int thread) {
    float* room = reinterpret_cast<float*>(memory) + thread * floats;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;)
      sums.add(i / args->n_kv_heads, i % args->n_kv_heads, room);
  };
  parallel(threads, body);
  return 0;
}
