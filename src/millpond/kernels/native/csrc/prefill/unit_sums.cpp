// Attention that tokens get from some queries of a pass some way behind them in their unit, added up for each KV head.
//
// The denominators are known, so that nothing outside a unit is read: products of a unit's keys with its queries, as in
// prefill, then exponentials straight into the sums.
#include "common/maths.hpp"
#include "common/threads.hpp"
#include "prefill/pack.hpp"

namespace mp {
namespace {

constexpr int TOGETHER = 16;  // queries

// Room of a thread.
struct UnitRoom {
  float *rows, *keys, *queries, *logits, *sums;
  int row_pad;

  UnitRoom(const UnitSumsArgs& a, int columns, char* memory) : row_pad(int(round_up(a.dim, W))) {
    const int64_t most = TOGETHER * (a.n_heads / a.n_kv_heads);
    auto take = [&memory](int64_t n) { return reinterpret_cast<float*>(std::exchange(memory, memory + round_up(4 * n, 64))); };
    rows = take(int64_t(TILE) * row_pad), keys = take(int64_t(columns) * row_pad);
    queries = take(round_up(a.dim, DEPTH) * most), logits = take(most * columns), sums = take(columns);
  }
  static int64_t bytes(const UnitSumsArgs& a, int columns) {
    const UnitRoom room(a, columns, nullptr);
    return round_up(reinterpret_cast<char*>(room.sums + columns) - static_cast<char*>(nullptr), 4096);
  }
};

// A unit of one KV head: tokens first .. last, which queries up to `end` ask about.
class Unit {
 public:
  Unit(const UnitSumsArgs& a, const UnitRoom& room, int head, int64_t first, int columns)
      : a_(a), r_(room), head_(head), group_(int(a.n_heads / a.n_kv_heads)), columns_(columns), first_(first) {}

  void add() {
    const int64_t begin = a_.n_columns - a_.n_queries, end = std::min(first_ + a_.unit, a_.n_columns);
    const int64_t low = std::max(first_, begin), until = a_.step - 1 - low % a_.step;
    int at[TOGETHER], n = 0;
    bool packed = false;
    for (int64_t p = low + until; p < end; p += a_.step) {
      if (p - first_ >= a_.least) at[n++] = int(p - first_);
      if (n == 0 || (n < TOGETHER && p + a_.step < end)) continue;
      if (!packed) pack(int(end - first_)), packed = true;
      ask(at, n, begin);
      n = 0;
    }
    if (!packed) return;
    const float share = 1.0f / float(group_);
    float* to = a_.sums + head_ * a_.sums_head + (first_ - (begin - begin % a_.unit));
    for (int64_t c = 0; c < end - first_; ++c) to[c] += r_.sums[c] * share;
  }

 private:
  void pack(int n) {
    std::memset(r_.sums, 0, size_t(columns_) * 4);
    for (int c = 0; c < n; c += TILE) {
      for (int i = 0; i < TILE; ++i) {
        float* row = r_.rows + i * r_.row_pad;
        if (c + i < n)
          load_row(row, offset(a_.k, a_.k_dtype, head_ * a_.k_head + (first_ + c + i) * a_.k_row), a_.k_dtype,
                   int(a_.dim), r_.row_pad);
        else
          std::memset(row, 0, size_t(r_.row_pad) * 4);
      }
      transpose(r_.rows, r_.keys + int64_t(c) * r_.row_pad, TILE, r_.row_pad);
    }
  }

  // Some queries, at ascending places of the unit, none of which sees no token.
  void ask(const int* at, int n, int64_t begin) {
    const int rows = n * group_, panel = TOGETHER * group_ * DEPTH, dim = int(a_.dim);
    for (int i = 0, r = 0; i < n; ++i)
      for (int g = 0; g < group_; ++g, ++r) {
        const int64_t row = (head_ * group_ + g) * a_.q_head + (first_ + at[i] - begin) * a_.q_row;
        for (int d = 0; d < dim; d += DEPTH)
          widen(r_.queries + d / DEPTH * panel + r * DEPTH, offset(a_.q, a_.q_dtype, row + d), a_.q_dtype,
                std::min(DEPTH, dim - d));
      }
    const int least = int(a_.least);
    for (int c = 0, i = 0; c <= at[n - 1] - least; c += TILE) {
      while (at[i] - least < c) ++i;  // earlier queries see nothing from here on
      const int r = i * group_;
      for (int d = 0; d < dim; d += DEPTH)
        multiply(rows - r, r_.queries + d / DEPTH * panel + r * DEPTH, r_.keys + int64_t(c) * r_.row_pad + d * TILE,
                 std::min(DEPTH, dim - d), TILE, r_.logits + int64_t(r) * columns_ + c, columns_, d > 0);
      for (int v = c; v < c + TILE; v += W) store(r_.sums + v, load(r_.sums + v) + received(at, i, n, v, begin));
    }
  }

  // What W tokens get from queries i .. n - 1.
  vf received(const int* at, int i, int n, int column, int64_t begin) const {
    const bool caps = a_.softcap != 0;
    const vf inner = splat(caps ? float(a_.scale / a_.softcap) : 0.0f), outer = splat(float(caps ? a_.softcap : a_.scale));
    const vi tokens = iota() + column;
    vf all{};
    for (; i < n; ++i) {
      const int after = a_.window > 0 ? int(std::max<int64_t>(-1, at[i] - a_.window)) : -1;
      const int upto = at[i] - int(a_.least);
      if (upto < column || after >= column + W) continue;
      vf own{};
      for (int g = 0; g < group_; ++g) {
        const float less = a_.lse[(head_ * group_ + g) * a_.lse_head + (first_ + at[i] - begin) * a_.lse_row];
        vf x = load(r_.logits + int64_t(i * group_ + g) * columns_ + column);
        x = (caps ? tanh(x * inner) : x) * outer - less;
        own += exp(select(x > vf{}, vf{}, x));  // above 1: rounding
      }
      all += select((tokens <= upto) & (tokens > after), own, vf{});
    }
    return all;
  }

  const UnitSumsArgs& a_;
  const UnitRoom& r_;
  const int head_, group_, columns_;
  const int64_t first_;
};

int unit_sums(const UnitSumsArgs& a) {
  const int64_t begin = a.n_columns - a.n_queries, first = begin - begin % a.unit;
  const int64_t units = (a.n_columns - first + a.unit - 1) / a.unit;
  const int columns = int(round_up(std::min(a.unit, a.n_columns - first), TILE));
  const int64_t products = a.n_queries / a.step * a.n_heads * a.dim * columns / 2;
  const int threads = int(std::min(a.n_threads, 1 + products / (1 << 20)));
  const int64_t room = UnitRoom::bytes(a, columns);
  static thread_local Workspace workspace;
  char* memory = workspace.get(threads * room);
  if (memory == nullptr) return 1;
  std::atomic<int64_t> next{0};
  auto body = [&](int thread) {
    const UnitRoom own(a, columns, memory + thread * room);
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < units * a.n_kv_heads;)
      Unit(a, own, int(i % a.n_kv_heads), first + i / a.n_kv_heads * a.unit, columns).add();
  };
  parallel(threads, body);
  return 0;
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_unit_sums(const mp::UnitSumsArgs* args) {
  return mp::unit_sums(*args);
}
