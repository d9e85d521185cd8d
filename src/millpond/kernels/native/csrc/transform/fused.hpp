// a * b + c, rounded once, with equal bits on every instruction set.
#pragma once

#include "common/simd.hpp"

namespace mp {

#if defined(__AVX512F__)
MP_INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__AVX2__) && defined(__FMA__)
MP_INLINE vf fused(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__aarch64__)
MP_INLINE vf fused(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
// In doubles: a product of floats is exact there. A sum that is not is rounded to odd, by what TwoSum (Knuth) says it
// lost, so that rounding it to float is as if it were the first (Boldo and Melquiond 2008).
MP_INLINE vf fused(vf a, vf b, vf c) {
  typedef double vd __attribute__((vector_size(W * 8)));
  typedef int64_t vl __attribute__((vector_size(W * 8)));
  const vd product = __builtin_convertvector(a, vd) * __builtin_convertvector(b, vd);
  const vd addend = __builtin_convertvector(c, vd), sum = product + addend, part = sum - product;
  const vd lost = (product - (sum - part)) + (addend - part);
  const vl inexact = (vl)(lost < vd{}) | (vl)(lost > vd{}), odd = (vl)sum & 1;
  const vl step = (vl)(((vl)lost ^ (vl)sum) < vl{}) | 1;  // -1: towards zero
  return __builtin_convertvector((vd)((vl)sum + (inexact & (odd - 1) & step)), vf);
}
#endif

}  // namespace mp
