// The inner loop of both products of prefill: a few rows times packed columns, sums held in registers.
#pragma once

#include "common/simd.hpp"

namespace mp {

// The left side lies in rows of DEPTH numbers, so one pointer reaches all rows of a tile. The right side is packed:
// for every step of the inner dimension the numbers of TILE columns side by side.
constexpr int DEPTH = 128;
constexpr int TILE = 2 * W;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_ROWS = 12;
#else
constexpr int TILE_ROWS = 6;
#endif

// How numbers of type T are multiplied: STEP neighbours of a row meet as many of a column at once.
template <class T>
struct Inner;

template <>
struct Inner<float> {
  using V = vf;
  static constexpr int STEP = 1;
  static MP_INLINE V left(const float* p) { return splat(*p); }
  static MP_INLINE V right(const float* p) { return load(p); }
  static MP_INLINE vf fma(vf acc, V a, V b) { return acc + a * b; }
};

#if defined(__AVX512BF16__)
template <>
struct Inner<bf16> {
  using V = __m512i;
  static constexpr int STEP = 2;
  static MP_INLINE V left(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
  }
  static MP_INLINE V right(const bf16* p) { return _mm512_loadu_si512(p); }
  static MP_INLINE vf fma(vf acc, V a, V b) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
};
#endif

// out[r][c] = sum_i left[r][i] * right[i][c] for R rows and C vectors of columns, on top of what is there if `add`.
template <class T, int R, int C>
void tile(const T* left, const T* right, int depth, float* out, int stride, bool add) {
  using I = Inner<T>;
  vf acc[R][C];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) acc[r][c] = vf{};
  for (int i = 0; i < depth; i += I::STEP, left += I::STEP, right += TILE * I::STEP) {
    typename I::V b[C];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) b[c] = I::right(right + c * W * I::STEP);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const typename I::V a = I::left(left + r * DEPTH);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) acc[r][c] = I::fma(acc[r][c], a, b[c]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      float* to = out + r * stride + c * W;
      store(to, add ? load(to) + acc[r][c] : acc[r][c]);
    }
}

// `tile` for `rows` rows, at most R.
template <class T, int C, int R = TILE_ROWS>
void tile_of(int rows, const T* left, const T* right, int depth, float* out, int stride, bool add) {
  if constexpr (R > 1)
    if (rows < R) return tile_of<T, C, R - 1>(rows, left, right, depth, out, stride, add);
  tile<T, R, C>(left, right, depth, out, stride, add);
}

// Any number of rows times `columns` <= TILE packed columns; whole vectors of `out` are written.
template <class T>
void multiply(int rows, const T* left, const T* right, int depth, int columns, float* out, int stride, bool add) {
  for (int r = 0; r < rows; r += TILE_ROWS) {
    const T* here = left + r * DEPTH;
    float* to = out + r * stride;
    if (columns > W)
      tile_of<T, 2>(rows - r, here, right, depth, to, stride, add);
    else
      tile_of<T, 1>(rows - r, here, right, depth, to, stride, add);
  }
}

}  // namespace mp
