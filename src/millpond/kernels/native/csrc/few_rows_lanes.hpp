// Up to MOST_ALONG rows of floats times rows of a matrix of bf16, lanes along a row: nothing has to be turned, so that few
// rows of x leave time for nothing but memory.
//
// A sum is 16 chains, one for each pair of numbers of a STRIDE, added up at the end in one order: a row of x has the same
// bits whatever is beside it. Each number of w is fetched and widened once.
#pragma once

#include "turned.hpp"

#if defined(__AVX512F__) && !defined(MP_PAIRED_PRODUCTS)
namespace mp {

constexpr int MOST_ALONG = 12;          // rows of x: with twice as many sums all registers are taken
constexpr int TOGETHER = 16;            // rows of w whose sums are held while a stretch of x stays in the L1 cache
constexpr int STRETCH_BYTES = 16 * 1024;  // of x

// Numbers of a row of x in a stretch, of rows of w that m rows of x meet at once.
constexpr int stretch_of(int m) { return STRETCH_BYTES / (4 * m) / STRIDE * STRIDE; }
constexpr int at_once(int m) { return m <= 4 ? 4 : 2; }

// Rows of x as they meet w: STRIDE after STRIDE those of all m rows, of each first the first of all pairs. `dim`: a multiple
// of STRIDE.
inline void lay_along(const float* rows, int64_t row, int m, int dim, float* to) {
  for (int d = 0; d < dim; d += STRIDE)
    for (int h = 0; h < m; ++h, to += STRIDE) part_pairs(rows + h * row + d, to);
}

// acc[t][h] += v[t] * x[h], lane by lane. What is loaded stays in a register: compilers would load it for each product.
template <int T, int H>
MP_INLINE void add_along(const vf (&v)[T], const float* x, vf (&acc)[T][H]) {
#pragma GCC unroll 12
  for (int h = 0; h < H; ++h) {
    vf q = load(x + h * STRIDE);
    asm("" : "+v"(q));
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) acc[t][h] += q * v[t];
  }
}

// The same for STRIDE numbers of T rows of w, zeros where fewer are `left`.
template <int T, int H>
MP_INLINE void add_stride(const bf16* w, int64_t row, int left, const float* x, vf (&acc)[T][H]) {
  const __mmask32 there = left >= STRIDE ? ~0u : (1u << left) - 1u;
  __m512i pairs[T];
  vf v[T];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    pairs[t] = left >= STRIDE ? _mm512_loadu_si512(w + t * row) : _mm512_maskz_loadu_epi16(there, w + t * row);
    asm("" : "+v"(pairs[t]));
    v[t] = first_floats(pairs[t]);
  }
  add_along<T, H>(v, x, acc);
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) v[t] = second_floats(pairs[t]);
  add_along<T, H>(v, x + W, acc);
}

// sums[h][t] = or += what `dim` numbers of H rows of x give with T rows of w, `row` numbers apart. What comes after these is
// asked for on the way: the next rows into the L1 cache and, kAhead, as many bytes from `ahead` on.
template <int T, int H, bool kAhead>
inline void stretch_along(const bf16* w, int64_t row, int dim, const float* x, vf (*sums)[TOGETHER], bool begins,
                          const char* ahead) {
  vf acc[T][H];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 12
    for (int h = 0; h < H; ++h) acc[t][h] = begins ? vf{} : sums[h][t];
  int d = 0;
  for (; d + STRIDE <= dim; d += STRIDE, x += STRIDE * H, ahead += T * 64) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) __builtin_prefetch(w + (T + t) * row + d, 0, 3);
    if (kAhead) prefetch_lines<T>(ahead);
    add_stride<T, H>(w + d, row, STRIDE, x, acc);
  }
  if (d < dim) add_stride<T, H>(w + d, row, dim - d, x, acc);
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 12
    for (int h = 0; h < H; ++h) sums[h][t] = acc[t][h];
}

// The sum over the lanes of each of 16 vectors.
MP_INLINE vf sum16(const vf* v) {
  __m512 halves[8], quarters[4], eighths[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
    halves[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = (__m512d)halves[2 * i], b = (__m512d)halves[2 * i + 1];
    quarters[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  }
  auto fold = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); };
  for (int i = 0; i < 2; ++i) eighths[i] = fold(quarters[2 * i], quarters[2 * i + 1]);
  return (vf)fold(eighths[0], eighths[1]);
}

// out[h * stride + t] = x[h] . w[t] for H rows of x, laid out, and n <= TOGETHER rows of w.
template <int H, bool kAhead>
inline void block_along(const bf16* w, int n, int64_t row, int dim, const float* x, float* out, int stride) {
  constexpr int T = at_once(H), LONG = stretch_of(H);
  vf sums[H][TOGETHER];
  const char* ahead = reinterpret_cast<const char*>(w) + std::max<int64_t>(AHEAD, TOGETHER * row * 2);
  for (int from = 0; from < dim; from += LONG, x += LONG * H) {
    const int here = std::min(LONG, dim - from);
    int t = 0;
    for (; t + T <= n; t += T, ahead += T * here * 2)
      stretch_along<T, H, kAhead>(w + t * row + from, row, here, x, reinterpret_cast<vf(*)[TOGETHER]>(&sums[0][t]),
                                  from == 0, ahead);
    for (; t < n; ++t)
      stretch_along<1, H, false>(w + t * row + from, row, here, x, reinterpret_cast<vf(*)[TOGETHER]>(&sums[0][t]),
                                 from == 0, ahead);
  }
  for (int h = 0; h < H; ++h) {
    for (int t = n; t < TOGETHER; ++t) sums[h][t] = vf{};
    const vf all = sum16(sums[h]);
    std::memcpy(out + h * stride, &all, size_t(n) * 4);
  }
}

// The same for all m rows of x and n rows of w.
template <int H = MOST_ALONG>
inline void rows_along(const bf16* w, int n, int64_t row, int dim, const float* x, int m, float* out, int stride) {
  if constexpr (H > 1)
    if (m < H) return rows_along<H - 1>(w, n, row, dim, x, m, out, stride);
  for (int t = 0; t < n; t += TOGETHER) {
    const int rows = std::min(TOGETHER, n - t);
    if (row == dim)
      block_along<H, true>(w + t * row, rows, row, dim, x, out + t, stride);
    else
      block_along<H, false>(w + t * row, rows, row, dim, x, out + t, stride);
  }
}

}  // namespace mp
#endif
