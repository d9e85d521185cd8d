// Logits: the products of a few queries with many keys, four keys at a time.
#pragma once

#include "common/prefetch.hpp"
#include "common/simd.hpp"

namespace mp {

// Query heads per pass: as many accumulators as there are registers for.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int HEADS = 4;
#else
constexpr int HEADS = 2;
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

// s[h * s_stride + t] = q[h] . k[t] for t = 0..3 and H heads.
template <class T, int H>
MP_INLINE void dot4(const T* k, int dim, const typename Lane<T>::Q* q, int q_stride, float* s, int s_stride,
                    const char* ahead) {
  using L = Lane<T>;
  vf acc[H][4];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) acc[h][t] = vf{};
  int d = 0;
  for (; d + L::STEP <= dim; d += L::STEP, ahead += 4 * 64) {
    prefetch<4 * 64>(ahead);
    typename L::V key[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) key[t] = L::key(k + t * dim + d);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const typename L::V query = L::query(q + h * q_stride + d);
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) acc[h][t] = L::fma(acc[h][t], key[t], query);
    }
  }
  if (d < dim) {
    typename L::V key[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) key[t] = L::key_part(k + t * dim + d, dim - d);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const typename L::V query = L::query(q + h * q_stride + d);
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) acc[h][t] = L::fma(acc[h][t], key[t], query);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) store(s + h * s_stride, sum4(acc[h][0], acc[h][1], acc[h][2], acc[h][3]));
}

// Logits of n keys (a multiple of 4; rows past the last entry may hold anything) for `heads` query heads.
// `ahead`: n rows to prefetch on the way.
template <class T>
void dot_run(const T* k, int n, int dim, const typename Lane<T>::Q* q, int q_stride, int heads, float* s, int s_stride,
             const char* ahead) {
  const size_t row = size_t(dim) * sizeof(T);
  int h = 0;
  for (; h + HEADS <= heads; h += HEADS)
    for (int t = 0; t < n; t += 4)
      dot4<T, HEADS>(k + size_t(t) * dim, dim, q + h * q_stride, q_stride, s + h * s_stride + t, s_stride, ahead + t * row);
  for (int t = 0; t < n && h < heads; t += 4) {
    const T* key = k + size_t(t) * dim;
    if (HEADS > 3 && heads - h == 3)
      dot4<T, 3>(key, dim, q + h * q_stride, q_stride, s + h * s_stride + t, s_stride, ahead + t * row);
    else if (HEADS > 2 && heads - h == 2)
      dot4<T, 2>(key, dim, q + h * q_stride, q_stride, s + h * s_stride + t, s_stride, ahead + t * row);
    else
      dot4<T, 1>(key, dim, q + h * q_stride, q_stride, s + h * s_stride + t, s_stride, ahead + t * row);
  }
}

}  // namespace mp
