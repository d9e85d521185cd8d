// A few rows of floats times rows of a matrix of bf16, where that is faster than products of pairs of bf16, or all there is.
//
// Rows of w are turned, 16 at a time, so that a lane holds one, and meet every row of x. Every sum is one chain along a
// row, in order, so a row of x has the same bits whatever is beside it. Each number of w is fetched and widened once.
#pragma once

#include "linear/transposed_rows.hpp"

#if defined(__AVX512F__) && !defined(MP_PAIRED_PRODUCTS)
namespace mp {

constexpr int MOST_TURNED = 16;  // rows of x: as many sums stay in registers

// Whether m rows of x have to be laid out before they meet w.
inline bool needs_order(int) { return true; }

// Rows of x as they meet w: number after number those of all m rows. `dim`: a multiple of STRIDE.
inline void lay_out(const float* rows, int64_t row, int m, int dim, float* to) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(rows);
  for (int d = 0; d < dim; d += W) transpose_block(words + d, row, m, reinterpret_cast<uint32_t*>(to) + int64_t(d) * m, m);
}

// Two pairs of numbers of 16 rows of w meet H rows of x.
template <int H>
MP_INLINE void meet(const __m512i* pairs, const float* x, vf (&acc)[H]) {
#pragma GCC unroll 2
  for (int p = 0; p < 2; ++p, x += 2 * H) {
    const vf first = first_floats(pairs[p]), second = second_floats(pairs[p]);
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h) acc[h] += x[h] * first;
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h) acc[h] += x[H + h] * second;
  }
}

// out[h * stride + t] = x[h] . w[t] for H rows of x, laid out, and 16 rows of w, `row` numbers apart. kAhead: these are
// neighbours in memory, and as many bytes are asked for, a tile ahead. What is turned next is turned, and what comes after
// is asked for into the L1 cache, bit by bit between the products, so that none waits for another.
template <int H, bool kAhead>
inline void turned_tile(const bf16* w, int64_t row, int dim, const float* x, float* out, int stride) {
  vf acc[H];
#pragma GCC unroll 16
  for (int h = 0; h < H; ++h) acc[h] = vf{};
  __m512i turned[2][TURNED], fours[TURNED];
  for (int i = 0; i < TURNED; i += 4) turn_four(w, row, dim, i, fours);
  for (int c = 0; c < 4; ++c) turn_quarters(fours, c, turned[0]);
  const char* ahead = reinterpret_cast<const char*>(w) + std::max<int64_t>(AHEAD, TURNED * row * 2);
  for (int d = 0; d < dim; d += STRIDE, ahead += TURNED * 64, x += STRIDE * H) {
    const __m512i* now = turned[d / STRIDE % 2];
    __m512i* next = turned[(d / STRIDE + 1) % 2];
    const int later = d + STRIDE;
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
      for (int t = 4 * i; t < 4 * i + 4; ++t) __builtin_prefetch(w + t * row + later + STRIDE, 0, 3);
      if (kAhead) prefetch_lines<2>(ahead + 2 * i * 64);
      if (later < dim) turn_four(w + later, row, dim - later, 4 * i, fours);
      meet<H>(now + 2 * i, x + 4 * i * H, acc);
    }
    for (int c = 0; c < 4; ++c) {
      if (kAhead) prefetch_lines<2>(ahead + (8 + 2 * c) * 64);
      if (later < dim) turn_quarters(fours, c, next);
      meet<H>(now + 8 + 2 * c, x + (16 + 4 * c) * H, acc);
    }
  }
#pragma GCC unroll 16
  for (int h = 0; h < H; ++h) store(out + h * stride, acc[h]);
}

template <bool kAhead, int H = MOST_TURNED>
inline void turned_tile_of(int m, const bf16* w, int64_t row, int dim, const float* x, float* out, int stride) {
  if constexpr (H > 1)
    if (m < H) return turned_tile_of<kAhead, H - 1>(m, w, row, dim, x, out, stride);
  turned_tile<H, kAhead>(w, row, dim, x, out, stride);
}

// out[h * stride + t] = x[h] . w[t] for all m rows of x, laid out, and n rows of w.
inline void few_rows(const bf16* w, int n, int64_t row, int dim, const float* x, int64_t, int m, float* out, int stride) {
  int t = 0;
  for (; t + TURNED <= n; t += TURNED) {
    if (row == dim)
      turned_tile_of<true>(m, w + t * row, row, dim, x, out + t, stride);
    else
      turned_tile_of<false>(m, w + t * row, row, dim, x, out + t, stride);
  }
  for (; t < n; ++t) {  // the last ones, each as all of a tile
    float same[MOST_TURNED * TURNED];
    turned_tile_of<false>(m, w + t * row, 0, dim, x, same, TURNED);
    for (int h = 0; h < m; ++h) out[h * stride + t] = same[h * TURNED];
  }
}

}  // namespace mp
#endif
