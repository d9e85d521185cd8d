// Many rows times a matrix of bf16, with the norm in front of it, and behind it what can be done while the sums are in
// registers.
//
// Rows are packed first and then taken strip by strip: one stays in the cache while panels of columns pass by, each packed
// by the thread that multiplies it. Every sum is made in one go along the row, so results do not depend on the threads.
// Packed numbers are pairs of bf16, or floats where those are multiplied faster.
#include "common/norm.hpp"
#include "common/threads.hpp"
#include "common/transpose.hpp"
#include "common/workspace.hpp"
#include "linear/epilogue.hpp"
#include "prefill/outer.hpp"

#if defined(__AVX2__)
namespace mp {
namespace {

#if defined(MP_PAIRED_PRODUCTS)
using Number = bf16;  // as which rows and columns are packed
#else
using Number = float;
#endif
constexpr int STEP = Inner<Number>::STEP;
constexpr int64_t ITEM = sizeof(Number);

constexpr int ROWS = TILE_ROWS;                   // of a tile: with two vectors of columns, sums that fit the registers
constexpr int64_t STRIP_BYTES = 1536 * 1024;      // of packed rows, about: beside its panel a strip stays close
constexpr int64_t PACKED_BYTES = 12 * 1024 * 1024;  // of rows that are packed at once: whole strips
constexpr int SHORTEST_STRIP = 384;               // rows, at least: what packing a panel is worth

// W words of each of n rows of bf16, `words` words apart, packed side by side: see transpose.hpp.
MP_INLINE void pack_words(const uint32_t* from, int64_t words, int n, float* to, int64_t to_row) {
  transpose_floats(from, words, n, to, to_row);
}

#if defined(__AVX512F__)
MP_INLINE void pack_words(const uint32_t* from, int64_t words, int n, bf16* to, int64_t to_row) {
  transpose_block(from, words, n, reinterpret_cast<uint32_t*>(to), to_row);
}

MP_INLINE __m256i halves(vf x) {  // the bits of bf16
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh((__m512)x);
#else
  return _mm512_cvtepi32_epi16((__m512i)(round_bf16(x) >> 16));
#endif
}
MP_INLINE vf rounded(vf x) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(x)), 16); }
MP_INLINE void store_columns(bf16* to, vf x, int n) {
  _mm256_mask_storeu_epi16(to, __mmask16((1u << n) - 1u), halves(x));
}
#else
MP_INLINE vf rounded(vf x) { return (vf)(round_bf16(x) & 0xffff0000u); }
MP_INLINE void store_columns(bf16* to, vf x, int n) {
  typedef uint16_t vh __attribute__((vector_size(W * 2)));
  const vh bits = __builtin_convertvector(round_bf16(x) >> 16, vh);
  std::memcpy(to, &bits, size_t(n) * 2);
}
#endif
MP_INLINE vf load_columns(const bf16* p, int n) { return n >= W ? load(p) : load_part(p, n); }

class Gemm {
 public:
  explicit Gemm(const GemmArgs& args)
      : a_(args), k_(int(args.k)), columns_(args.halves ? W : TILE), strips_(1), strip_(0) {
    const int64_t most = std::max<int64_t>(SHORTEST_STRIP, STRIP_BYTES / (ITEM * a_.k));
    strips_ = int((a_.m + most - 1) / most);
    strip_ = int(round_up((a_.m + strips_ - 1) / strips_, ROWS));
  }
  int run();

 private:
  void pack_rows(int64_t first, Number* to, float* wide, bf16* rows) const;
  void pack_columns(int64_t first, Number* to) const;
  void pack_half(int64_t first, int64_t end, Number* to) const;
  Soon half(int64_t first, int64_t end) const;
  template <int ACT>
  void panel(int64_t first, int64_t end, int64_t column, const Number* rows, const Number* columns) const;
  template <int ACT>
  void finish(const vf (&sums)[ROWS][2], int64_t row, int n, int64_t column) const;
  void panel(int64_t first, int64_t end, int64_t column, const Number* rows, const Number* columns) const;

  const GemmArgs& a_;
  const int k_, columns_;
  int strips_, strip_;
};

// ROWS rows from `first` on, normalised, as (k / STEP, ROWS, STEP); what stands for a row behind the last one is not used.
void Gemm::pack_rows(int64_t first, Number* to, float* wide, bf16* rows) const {
  const int n = int(std::min<int64_t>(ROWS, a_.m - first));
  const bf16* from = static_cast<const bf16*>(a_.x) + first * a_.k;
  if (a_.norm != nullptr) {
    const Norm norm{a_.norm, a_.norm_bias, a_.centred, float(a_.eps)};
    for (int r = 0; r < n; ++r) {
      normalise(wide, from + r * a_.k, norm, BF16, k_);
      narrow(rows + r * a_.k, BF16, wide, k_);
    }
    from = rows;
  }
  const uint32_t* words = reinterpret_cast<const uint32_t*>(from);
  for (int i = 0; i < k_ / 2; i += W) pack_words(words + i, k_ / 2, n, to + int64_t(i) * 2 * ROWS, ROWS);
}

// W columns from `first` on, as every other vector of (k / STEP, TILE, STEP); sums of one behind the last are not used.
void Gemm::pack_half(int64_t first, int64_t end, Number* to) const {
  const int n = int(std::min<int64_t>(W, end - first));
  const uint32_t* words = reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(a_.weight) + first * a_.k);
  for (int i = 0; n > 0 && i < k_ / 2; i += W) pack_words(words + i, k_ / 2, n, to + int64_t(i) * 2 * TILE, TILE);
}

void Gemm::pack_columns(int64_t first, Number* to) const {
  pack_half(first, a_.n, to);
  a_.halves ? pack_half(a_.n + first, 2 * a_.n, to + W * STEP) : pack_half(first + W, a_.n, to + W * STEP);
}

template <int ACT>
MP_INLINE vf act(vf x) {
  if constexpr (ACT == SILU) return rounded(silu(x));
  if constexpr (ACT == GELU_TANH) return rounded(gelu_tanh(x));
  if constexpr (ACT == RELU) return vmax(x, vf{});
  return x;
}

// Sums of n rows to results; each is rounded where a layer of its own would write it.
template <int ACT>
void Gemm::finish(const vf (&sums)[ROWS][2], int64_t row, int n, int64_t column) const {
  const bf16* bias = static_cast<const bf16*>(a_.bias);
  for (int c = 0; c < (a_.halves ? 1 : 2); ++c) {
    const int64_t at = column + c * W;
    const int width = int(std::min<int64_t>(W, a_.n - at));
    if (width <= 0) return;
    const vf first = bias != nullptr ? load_columns(bias + at, width) : vf{};
    const vf second = bias != nullptr && a_.halves ? load_columns(bias + a_.n + at, width) : vf{};
    for (int r = 0; r < n; ++r) {
      const int64_t place = (row + r) * a_.n + at;
      vf x = act<ACT>(rounded(sums[r][c] + first));
      if (a_.halves) x = x * rounded(sums[r][1] + second);
      if (a_.residual != nullptr) x = rounded(x) + load_columns(static_cast<const bf16*>(a_.residual) + place, width);
      store_columns(static_cast<bf16*>(a_.out) + place, x, width);
    }
  }
}

// What `pack_half` reads, a line at each step of a tile; nothing where there is no such half.
Soon Gemm::half(int64_t first, int64_t end) const {
  const bool there = first + W <= end;
  return {reinterpret_cast<const char*>(static_cast<const bf16*>(a_.weight) + (there ? first * a_.k : 0)), there ? 2 * W * STEP : 0};
}

// Rows first .. end times a panel. `rows`: the packed strip; `columns`: the packed panel. The first tiles ask for the
// panel that this thread is likely to pack next.
template <int ACT>
void Gemm::panel(int64_t first, int64_t end, int64_t column, const Number* rows, const Number* columns) const {
  const int64_t tile = int64_t(ROWS) * k_, next = column + a_.n_threads * columns_;
  for (int64_t row = first; row < end; row += ROWS, rows += tile) {
    vf sums[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = vf{};
    Soon soon{reinterpret_cast<const char*>(row + ROWS < end ? rows + tile : rows), 4 * ROWS};
    if (row == first) soon = half(next, a_.n);
    if (row == first + ROWS) soon = a_.halves ? half(a_.n + next, 2 * a_.n) : half(next + W, a_.n);
    add_products<Number, ROWS, 2>(rows, STEP, STEP * ROWS, columns, STEP * TILE, k_ / STEP, soon, sums);
    finish<ACT>(sums, row, int(std::min<int64_t>(ROWS, end - row)), column);
  }
}

void Gemm::panel(int64_t first, int64_t end, int64_t column, const Number* rows, const Number* columns) const {
  switch (a_.act) {
    case SILU: return panel<SILU>(first, end, column, rows, columns);
    case GELU_TANH: return panel<GELU_TANH>(first, end, column, rows, columns);
    case RELU: return panel<RELU>(first, end, column, rows, columns);
    default: return panel<0>(first, end, column, rows, columns);
  }
}

// Two loops over the threads for all strips that are packed together: each end of a loop waits for the last thread.
int Gemm::run() {
  const int64_t panels = (a_.n + columns_ - 1) / columns_, strip_bytes = int64_t(strip_) * a_.k * ITEM;
  const int64_t together = std::min<int64_t>(strips_, std::max<int64_t>(1, PACKED_BYTES / strip_bytes));
  const int64_t packed_bytes = round_up(together * strip_bytes, 4096), rows = together * strip_;
  const int64_t room_bytes = round_up(std::max<int64_t>(TILE * a_.k * ITEM, a_.k * 4 + ROWS * a_.k * 2), 4096);
  static thread_local Workspace workspace;
  char* memory = workspace.get(packed_bytes + a_.n_threads * room_bytes);
  if (memory == nullptr) return 1;
  Number* packed = reinterpret_cast<Number*>(memory);
  for (int64_t first = 0; first < a_.m; first += rows) {
    const int64_t end = std::min<int64_t>(first + rows, a_.m), tiles = (end - first + ROWS - 1) / ROWS;
    std::atomic<int64_t> next{0};
    auto pack = [&](int thread) {
      float* wide = reinterpret_cast<float*>(memory + packed_bytes + thread * room_bytes);
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tiles;)
        pack_rows(first + i * ROWS, packed + i * ROWS * a_.k, wide, reinterpret_cast<bf16*>(wide + k_));
    };
    parallel(int(std::min(tiles, a_.n_threads)), pack);
    next = 0;
    const int64_t items = (end - first + strip_ - 1) / strip_ * panels;
    auto multiply = [&](int thread) {
      Number* columns = reinterpret_cast<Number*>(memory + packed_bytes + thread * room_bytes);
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
        const int64_t at = i / panels * strip_, column = i % panels * columns_;
        pack_columns(column, columns);
        panel(first + at, std::min(first + at + strip_, end), column, packed + at * a_.k, columns);
      }
    };
    parallel(int(std::min(items, a_.n_threads)), multiply);
  }
  return 0;
}

}  // namespace
}  // namespace mp
#endif

// Returns 2 where the hardware has no vectors of 8 floats.
extern "C" __attribute__((visibility("default"))) int mp_gemm(const mp::GemmArgs* args) {
#if defined(__AVX2__)
  return mp::Gemm(*args).run();
#else
  (void)args;
  return 2;
#endif
}
