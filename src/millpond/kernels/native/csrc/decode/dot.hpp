// Logits: the products of a few queries with many keys, four keys at a time.
#pragma once

#include "common/prefetch.hpp"
#include "common/simd.hpp"

namespace mp {

// Query heads per pass that meet four keys: as many accumulators as there are registers for. Where these are 16, more
// heads meet two keys, so that each key is widened for up to MOST_HEADS of them.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int HEADS = 4, MOST_HEADS = 4;
#else
constexpr int HEADS = 2, MOST_HEADS = 6;
#endif

// How keys of storage type T meet the query: `Q` is the type the query is held in, `STEP` the numbers per vector.
template <class T>
struct Lane {
  using Q = float;
  using V = vf;
  static constexpr int STEP = W;
  static MP_INLINE V key(const T* p) { return load(p); }
  static MP_INLINE V key_part(const T* p, int n) { return load_part(p, n); }
  static MP_INLINE V query(const Q* p) { return load(p); }
  static MP_INLINE vf fma(vf acc, V k, V q) { return acc + k * q; }
};

#if defined(__AVX512BF16__)
// Pairs of bf16 products into float accumulators; the query is rounded to bf16.
template <>
struct Lane<bf16> {
  using Q = bf16;
  using V = __m512i;
  static constexpr int STEP = 32;
  static MP_INLINE V key(const bf16* p) { return _mm512_loadu_si512(p); }
  static MP_INLINE V key_part(const bf16* p, int n) { return _mm512_maskz_loadu_epi16((1u << n) - 1u, p); }
  static MP_INLINE V query(const Q* p) { return _mm512_loadu_si512(p); }
  static MP_INLINE vf fma(vf acc, V k, V q) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)k, (__m512bh)q); }
};
#endif

// Rows of the query buffer are padded with zeros to a multiple of this.
constexpr int QUERY_PAD = 32;

// s[h * s_stride + t] = q[h] . k[t] for t < R (2 or 4) and H heads. A sum has the same bits for every R and H.
template <class T, int H, int R>
MP_INLINE void dots(const T* k, int dim, const typename Lane<T>::Q* q, int q_stride, float* s, int s_stride,
                    const char* ahead) {
  using L = Lane<T>;
  vf acc[H][R];
#pragma GCC unroll 6
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int t = 0; t < R; ++t) acc[h][t] = vf{};
  int d = 0;
  constexpr int BYTES = R * L::STEP * int(sizeof(T));
  for (; d + L::STEP <= dim; d += L::STEP, ahead += BYTES) {
    prefetch<BYTES>(ahead);
    typename L::V key[R];
#pragma GCC unroll 4
    for (int t = 0; t < R; ++t) key[t] = L::key(k + t * dim + d);
#pragma GCC unroll 6
    for (int h = 0; h < H; ++h) {
      const typename L::V query = L::query(q + h * q_stride + d);
#pragma GCC unroll 4
      for (int t = 0; t < R; ++t) acc[h][t] = L::fma(acc[h][t], key[t], query);
    }
  }
  if (d < dim) {
    typename L::V key[R];
#pragma GCC unroll 4
    for (int t = 0; t < R; ++t) key[t] = L::key_part(k + t * dim + d, dim - d);
#pragma GCC unroll 6
    for (int h = 0; h < H; ++h) {
      const typename L::V query = L::query(q + h * q_stride + d);
#pragma GCC unroll 4
      for (int t = 0; t < R; ++t) acc[h][t] = L::fma(acc[h][t], key[t], query);
    }
  }
#pragma GCC unroll 6
  for (int h = 0; h < H; ++h) {
    const v4f sums = sum4(acc[h][0], acc[h][1], acc[h][R - 2], acc[h][R - 1]);
    std::memcpy(s + h * s_stride, &sums, R * sizeof(float));
  }
}

// Logits of n keys for H heads, R keys at a time.
template <class T, int H, int R>
void dot_heads(const T* k, int n, int dim, const typename Lane<T>::Q* q, int q_stride, float* s, int s_stride,
                         const char* ahead) {
  const size_t row = size_t(dim) * sizeof(T);
  for (int t = 0; t < n; t += R) dots<T, H, R>(k + size_t(t) * dim, dim, q, q_stride, s + t, s_stride, ahead + t * row);
}

// Logits of n keys (a multiple of 4; rows past the last entry may hold anything) for `heads` query heads.
// `ahead`: n rows to prefetch on the way.
template <class T>
void dot_run(const T* k, int n, int dim, const typename Lane<T>::Q* q, int q_stride, int heads, float* s, int s_stride,
             const char* ahead) {
  auto meet = [&](auto form, int h) { form(k, n, dim, q + h * q_stride, q_stride, s + h * s_stride, s_stride, ahead); };
  int h = 0;
  if constexpr (MOST_HEADS > HEADS) {
    for (; h + MOST_HEADS <= heads; h += MOST_HEADS) meet(dot_heads<T, MOST_HEADS, 2>, h);
    if (heads - h == 5) return meet(dot_heads<T, 5, 2>, h);
    if (heads - h >= 3 && heads > 4) meet(dot_heads<T, 3, 2>, h), h += 3;
  }
  for (; h + HEADS <= heads; h += HEADS) meet(dot_heads<T, HEADS, 4>, h);
  if constexpr (HEADS > 2) {
    if (heads - h == 3) return meet(dot_heads<T, 3, 4>, h);
    if (heads - h == 2) return meet(dot_heads<T, 2, 4>, h);
  }
  if (heads - h == 1) meet(dot_heads<T, 1, 4>, h);
}

}  // namespace mp
