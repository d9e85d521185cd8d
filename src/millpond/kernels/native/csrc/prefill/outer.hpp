// Sums of outer products, held in registers: numbers of a left side, one at a time, times vectors of a right side.
//
// Where the hardware multiplies pairs of bf16, a number is a pair of them: STEP neighbours along the inner dimension.
#pragma once

#include "common/prefetch.hpp"
#include "prefill/tile.hpp"

namespace mp {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int OUTER = 8;  // rows of the left side at a time
#else
constexpr int OUTER = 4;
#endif

// Memory that is read soon: in each step the line at `at` is asked for, then `at` moves on by `bytes`.
struct Soon {
  const char* at;
  int64_t bytes;
};

// acc[r][c] += sum_i left(r, i) * right(i, c) over n steps: left(r, i) lies at left + r * row + i * step, right(i, c) is
// vector c from right + i * right_step on.
template <class T, int R, int C>
MP_INLINE void add_products(const T* left, int64_t row, int64_t step, const T* right, int64_t right_step, int n,
                            Soon soon, vf (&acc)[R][C]) {
  using I = Inner<T>;
  for (int i = 0; i < n; ++i, left += step, right += right_step, soon.at += soon.bytes) {
    prefetch<64>(soon.at);
    typename I::V b[C];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) b[c] = I::right(right + c * W * I::STEP);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const typename I::V a = I::left(left + r * row);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) acc[r][c] = I::fma(acc[r][c], a, b[c]);
    }
  }
}

// out[r][c] = sum_i left(r, i) * right(i, c) for R rows and C vectors.
template <class T, int R, int C>
void set_products(const T* left, int64_t row, int64_t step, const T* right, int64_t right_step, int n,
                  Soon soon, float* out, int64_t stride) {
  vf acc[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) acc[r][c] = vf{};
  add_products<T, R, C>(left, row, step, right, right_step, n, soon, acc);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) store(out + r * stride + c * W, acc[r][c]);
}

// out[r][c] = out[r][c] * factors[r] + sum_i left(r, i) * right(i, c).
template <class T, int R, int C>
void fade_products(const T* left, int64_t row, int64_t step, const T* right, int64_t right_step, int n,
                   Soon soon, const float* factors, float* out, int64_t stride) {
  vf acc[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) acc[r][c] = load(out + r * stride + c * W) * factors[r];
  add_products<T, R, C>(left, row, step, right, right_step, n, soon, acc);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) store(out + r * stride + c * W, acc[r][c]);
}

}  // namespace mp
