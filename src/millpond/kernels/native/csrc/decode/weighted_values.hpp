// The output: sums of value rows weighted by the probabilities of a few query heads.
#pragma once

#include "decode/dot.hpp"

namespace mp {

// o[h][d .. d + N * W) += sum_t p[h][t] * v[t][d .. d + N * W), tokens in order.
// Each block prefetches its own columns of the rows at `ahead`: whole rows at once were slower on scattered pages.
template <class T, int H, int N>
MP_INLINE void weigh_block(const T* v, int n, int dim, const float* p, int p_stride, float* o, int o_stride,
                           const char* ahead) {
  vf acc[H][N];
#pragma GCC unroll 6
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) acc[h][j] = load(o + h * o_stride + j * W);
  for (int t = 0; t < n; ++t) {
    prefetch<N * W * int(sizeof(T))>(ahead + size_t(t) * size_t(dim) * sizeof(T));
    vf value[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) value[j] = load(v + size_t(t) * dim + j * W);
#pragma GCC unroll 6
    for (int h = 0; h < H; ++h) {
      const vf weight = splat(p[h * p_stride + t]);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) acc[h][j] += weight * value[j];
    }
  }
#pragma GCC unroll 6
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) store(o + h * o_stride + j * W, acc[h][j]);
}

// The last dim % W numbers of each row. Rows of o are padded, so whole vectors of o may be written.
template <class T, int H>
MP_INLINE void weigh_tail(const T* v, int n, int dim, int rest, const float* p, int p_stride, float* o, int o_stride) {
  vf acc[H];
#pragma GCC unroll 6
  for (int h = 0; h < H; ++h) acc[h] = load(o + h * o_stride);
  for (int t = 0; t < n; ++t) {
    const vf value = load_part(v + size_t(t) * dim, rest);
#pragma GCC unroll 6
    for (int h = 0; h < H; ++h) acc[h] += splat(p[h * p_stride + t]) * value;
  }
#pragma GCC unroll 6
  for (int h = 0; h < H; ++h) store(o + h * o_stride, acc[h]);
}

// N: vectors of a value row that meet H heads at a time, so that all sums stay in registers.
template <class T, int H, int N>
void weigh_heads(const T* v, int n, int dim, const float* p, int p_stride, float* o, int o_stride, const char* ahead) {
  int d = 0;
  for (; d + N * W <= dim; d += N * W, ahead += N * W * sizeof(T))
    weigh_block<T, H, N>(v + d, n, dim, p, p_stride, o + d, o_stride, ahead);
  for (; d + W <= dim; d += W, ahead += W * sizeof(T))
    weigh_block<T, H, 1>(v + d, n, dim, p, p_stride, o + d, o_stride, ahead);
  if (d < dim) weigh_tail<T, H>(v + d, n, dim, dim - d, p, p_stride, o + d, o_stride);
}

// n value rows for `heads` query heads; exactly n rows are read. `ahead`: n rows to prefetch on the way.
template <class T>
void weigh_run(const T* v, int n, int dim, const float* p, int p_stride, int heads, float* o, int o_stride,
               const char* ahead) {
  auto meet = [&](auto form, int h) { form(v, n, dim, p + h * p_stride, p_stride, o + h * o_stride, o_stride, ahead); };
  int h = 0;
  if constexpr (MOST_HEADS > HEADS) {
    for (; h + MOST_HEADS <= heads; h += MOST_HEADS) meet(weigh_heads<T, MOST_HEADS, 2>, h);
    if (heads - h == 5) return meet(weigh_heads<T, 5, 2>, h);
    if (heads - h >= 3 && heads > 4) meet(weigh_heads<T, 3, 4>, h), h += 3;
  }
  for (; h + HEADS <= heads; h += HEADS) meet(weigh_heads<T, HEADS, 4>, h);
  if constexpr (HEADS > 2) {
    if (heads - h == 3) return meet(weigh_heads<T, 3, 4>, h);
    if (heads - h == 2) return meet(weigh_heads<T, 2, 4>, h);
  }
  if (heads - h == 1) meet(weigh_heads<T, 1, 4>, h);
}

}  // namespace mp
