// A few rows of bf16 times rows of a matrix, where products of pairs of them are the fastest.
//
// Every sum is one chain over the pairs of a row, in order, in a lane of its own: a result has the same bits whichever
// of the two forms below makes it. Up to NARROW rows of x meet 16 rows of w, turned so that a lane holds a row of w; more
// rows of x, a lane each, meet one pair of w after the other. Either way each number of w is fetched once.
#pragma once

#include "linear/transposed_rows.hpp"

#if defined(MP_PAIRED_PRODUCTS)
namespace mp {

constexpr int NARROW = 12;      // rows of x up to which rows of w are turned: beyond it too few lanes would be idle
constexpr int STREAMED = 8;     // rows of w that meet many rows of x together
constexpr int LANES = 16;       // that rows of x take

// Whether m rows of x have to be laid out before they meet w.
inline bool needs_order(int m) { return m > NARROW; }

MP_INLINE __m512i pair_of(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}

// x as more than NARROW rows meet w: pair after pair those of all m rows side by side, zeros in the lanes that no row
// takes. Rows are padded with zeros to whole STRIDEs.
inline void lay_out(const bf16* rows, int64_t row, int m, int dim, bf16* to) {
  for (int d = 0; d < dim; d += STRIDE) {
    __m512i r[LANES];
    for (int h = 0; h < LANES; ++h) r[h] = h < m ? _mm512_loadu_si512(rows + h * row + d) : _mm512_setzero_si512();
    turn(r);
    for (int p = 0; p < LANES; ++p, to += 2 * LANES) _mm512_storeu_si512(to, r[p]);
  }
}

// out[h * stride + t] = x[h] . w[t] for H rows of x and 16 rows of w, `row` numbers apart. kAhead: these are neighbours
// in memory, and as many bytes are asked for, a tile ahead.
template <int H, bool kAhead>
inline void turned_tile(const bf16* w, int64_t row, int dim, const bf16* x, int64_t x_row, float* out, int stride) {
  __m512 acc[H];
#pragma GCC unroll 12
  for (int h = 0; h < H; ++h) acc[h] = _mm512_setzero_ps();
  const char* ahead = reinterpret_cast<const char*>(w) + std::max<int64_t>(AHEAD, TURNED * row * 2);
  for (int d = 0; d < dim; d += STRIDE, ahead += TURNED * 64) {
    if (kAhead) prefetch_lines<TURNED>(ahead);
    __m512i r[TURNED];
    turn_rows(w + d, row, dim - d, r);
#pragma GCC unroll 16
    for (int p = 0; p < TURNED; ++p)
#pragma GCC unroll 12
      for (int h = 0; h < H; ++h)
        acc[h] = _mm512_dpbf16_ps(acc[h], (__m512bh)r[p], (__m512bh)pair_of(x + h * x_row + d + 2 * p));
  }
#pragma GCC unroll 12
  for (int h = 0; h < H; ++h) _mm512_storeu_ps(out + h * stride, acc[h]);
}

template <bool kAhead, int H = NARROW>
inline void turned_tile_of(int m, const bf16* w, int64_t row, int dim, const bf16* x, int64_t x_row, float* out,
                           int stride) {
  if constexpr (H > 1)
    if (m < H) return turned_tile_of<kAhead, H - 1>(m, w, row, dim, x, x_row, out, stride);
  turned_tile<H, kAhead>(w, row, dim, x, x_row, out, stride);
}

// One step of STRIDE numbers of 8 rows of w.
MP_INLINE void add_stride(const bf16* w, int64_t row, const bf16* x, __m512 (&acc)[STREAMED]) {
  for (int p = 0; p < STRIDE; p += 2, x += 2 * LANES) {
    const __m512bh pairs = (__m512bh)_mm512_loadu_si512(x);
#pragma GCC unroll 8
    for (int t = 0; t < STREAMED; ++t) acc[t] = _mm512_dpbf16_ps(acc[t], (__m512bh)pair_of(w + t * row + p), pairs);
  }
}

// out[h * stride + t] = x[h] . w[t] for m rows of x, laid out, and 8 rows of w. kAhead: as above.
template <bool kAhead>
inline void streamed_tile(const bf16* w, int64_t row, int dim, const bf16* x, int m, float* out, int stride) {
  __m512 acc[STREAMED];
#pragma GCC unroll 8
  for (int t = 0; t < STREAMED; ++t) acc[t] = _mm512_setzero_ps();
  const char* ahead = reinterpret_cast<const char*>(w) + std::max<int64_t>(AHEAD, STREAMED * row * 2);
  int d = 0;
  for (; d + STRIDE <= dim; d += STRIDE, x += STRIDE * LANES, ahead += STREAMED * 64) {
    if (kAhead) prefetch_lines<STREAMED>(ahead);
    add_stride(w + d, row, x, acc);
  }
  if (d < dim) {
    bf16 last[STREAMED * STRIDE] = {};
    for (int t = 0; t < STREAMED; ++t) std::memcpy(last + t * STRIDE, w + t * row + d, size_t(dim - d) * 2);
    add_stride(last, STRIDE, x, acc);
  }
  float sums[STREAMED][LANES];
  std::memcpy(sums, acc, sizeof sums);
  for (int h = 0; h < m; h += 4)  // four by four: rows of sums are columns of the result
    for (int t = 0; t < STREAMED; t += 4) {
      __m128 a = _mm_loadu_ps(sums[t] + h), b = _mm_loadu_ps(sums[t + 1] + h);
      __m128 c = _mm_loadu_ps(sums[t + 2] + h), e = _mm_loadu_ps(sums[t + 3] + h);
      _MM_TRANSPOSE4_PS(a, b, c, e);
      float* to = out + h * stride + t;
      _mm_storeu_ps(to, a);
      if (h + 1 < m) _mm_storeu_ps(to + stride, b);
      if (h + 2 < m) _mm_storeu_ps(to + 2 * stride, c);
      if (h + 3 < m) _mm_storeu_ps(to + 3 * stride, e);
    }
}

// One tile of all m rows of x; `x`: laid out where m > NARROW, else rows `x_row` apart.
template <bool kAhead>
inline void few_rows_tile(const bf16* w, int64_t row, int dim, const bf16* x, int64_t x_row, int m, float* out,
                          int stride) {
  if (m <= NARROW)
    turned_tile_of<kAhead>(m, w, row, dim, x, x_row, out, stride);
  else
    streamed_tile<kAhead>(w, row, dim, x, m, out, stride);
}

// out[h * stride + t] = x[h] . w[t] for all m rows of x and n rows of w.
inline void few_rows(const bf16* w, int n, int64_t row, int dim, const bf16* x, int64_t x_row, int m, float* out,
                     int stride) {
  const int step = m <= NARROW ? TURNED : STREAMED;
  int t = 0;
  for (; t + step <= n; t += step) {
    if (row == dim)
      few_rows_tile<true>(w + t * row, row, dim, x, x_row, m, out + t, stride);
    else
      few_rows_tile<false>(w + t * row, row, dim, x, x_row, m, out + t, stride);
  }
  for (; t < n; ++t) {  // the last ones, each as all of a tile
    float same[16 * TURNED];
    few_rows_tile<false>(w + t * row, 0, dim, x, x_row, m, same, TURNED);
    for (int h = 0; h < m; ++h) out[h * stride + t] = same[h * TURNED];
  }
}

}  // namespace mp
#endif
