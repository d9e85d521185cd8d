// One vector of W floats, as wide as the instruction set that this file is compiled for.
// Arithmetic uses the vector extensions of GCC and Clang; intrinsics appear where the extensions leave speed behind.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define MP_INLINE inline __attribute__((always_inline))

// Whether products by the many are made of pairs of bf16. Some CPUs that multiply pairs do half as much in a cycle that way
// as with floats: a library of their own is built for them, with MP_FLOAT_PRODUCTS.
#if defined(__AVX512BF16__) && !defined(MP_FLOAT_PRODUCTS)
#define MP_PAIRED_PRODUCTS
#endif

namespace mp {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef float v4f __attribute__((vector_size(16)));

// Storage formats. Both are plain bits; arithmetic is always float.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

MP_INLINE vf splat(float x) { return x - vf{}; }
MP_INLINE vi splat(int32_t x) { return x - vi{}; }
MP_INLINE vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
MP_INLINE vi select(vi mask, vi yes, vi no) { return mask ? yes : no; }
MP_INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}
MP_INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

MP_INLINE vi iota() {
  vi v;
  for (int i = 0; i < W; ++i) v[i] = i;
  return v;
}

MP_INLINE float bf16_to_float(uint16_t bits) {
  uint32_t u = uint32_t(bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

MP_INLINE uint16_t float_to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40u);  // NaN stays NaN
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);                  // nearest, ties to even
}

// ------------------------------------------------------------------------------------------------ loads and stores

MP_INLINE vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

MP_INLINE vi load(const int32_t* p) {
  vi v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

MP_INLINE vu load_u16(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__SSE4_1__)
  return (vu)_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(__aarch64__)
  return (vu)vmovl_u16(vld1_u16(p));
#else
  vu v;
  for (int i = 0; i < W; ++i) v[i] = p[i];
  return v;
#endif
}

MP_INLINE vf load(const bf16* p) { return (vf)(load_u16(&p->bits) << 16); }

MP_INLINE vf load(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__) && defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#else
  vu h = load_u16(&p->bits);
  vu magnitude = (h & 0x7fffu) << 13;
  vf scaled = (vf)magnitude * 0x1p112f;  // moves the exponent bias from 15 to 127, subnormals included
  vf special = (vf)(magnitude | 0x7f800000u);
  vf wide = select((vi)(magnitude >= 0x0f800000u), special, scaled);
  return (vf)((vu)wide | ((h & 0x8000u) << 16));
#endif
}

// The first n < W numbers, then zeros. Nothing behind them is touched.
template <class T>
MP_INLINE auto load_part(const T* p, int n) {
  T part[W] = {};
  std::memcpy(part, p, size_t(n) * sizeof(T));
  return load(part);
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)
MP_INLINE vf load_part(const float* p, int n) { return (vf)_mm512_maskz_loadu_ps((1u << n) - 1u, p); }
MP_INLINE vf load_part(const bf16* p, int n) {
  __m256i h = _mm256_maskz_loadu_epi16((1u << n) - 1u, p);
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
}
MP_INLINE vf load_part(const f16* p, int n) {
  return (vf)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16((1u << n) - 1u, p));
}
#endif

template <class V>
MP_INLINE void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

template <class V>
MP_INLINE void store_part(void* p, V v, int n) {
  std::memcpy(p, &v, size_t(n) * 4);
}

// ------------------------------------------------------------------------------------------------ across the lanes

// The sums of the four quarters' lanes: W lanes folded to 4.
MP_INLINE v4f fold(vf v) {
#if defined(__AVX512F__)
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
  return (v4f)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  return (v4f)_mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
#else
  return v;
#endif
}

// (sum a, sum b, sum c, sum d): four horizontal sums by transposing adds.
MP_INLINE v4f sum4(vf a, vf b, vf c, vf d) {
#if defined(__AVX512F__)
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  __m512 low = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), high = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
  return fold((vf)_mm512_add_ps(low, high));
#elif defined(__AVX2__)
  __m256 ab = _mm256_hadd_ps((__m256)a, (__m256)b), cd = _mm256_hadd_ps((__m256)c, (__m256)d);
  return fold((vf)_mm256_hadd_ps(ab, cd));
#elif defined(__SSE3__)
  return (v4f)_mm_hadd_ps(_mm_hadd_ps((__m128)a, (__m128)b), _mm_hadd_ps((__m128)c, (__m128)d));
#elif defined(__aarch64__)
  return (v4f)vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b), vpaddq_f32((float32x4_t)c, (float32x4_t)d));
#else
  return v4f{a[0] + a[1] + a[2] + a[3], b[0] + b[1] + b[2] + b[3], c[0] + c[1] + c[2] + c[3], d[0] + d[1] + d[2] + d[3]};
#endif
}

MP_INLINE float sum(vf v) {
  v4f q = fold(v);
  return (q[0] + q[2]) + (q[1] + q[3]);
}

MP_INLINE float max(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float best = v[0];
  for (int i = 1; i < W; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

// (max a, max b, max c, max d).
MP_INLINE v4f max4(vf a, vf b, vf c, vf d) {
#if defined(__AVX512F__)
  const auto most = [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); };
  const __m512 ab = most(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  const __m512 cd = most(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  const __m512 all = most(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return (v4f)_mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
  return v4f{max(a), max(b), max(c), max(d)};
#endif
}

}  // namespace mp
