// exp, 2^x and tanh of a vector. The polynomials were fitted for this file (relative error below 1e-8 before
// rounding, that of 2^x below 1e-7).
#pragma once

#include "common/simd.hpp"

namespace mp {

// exp(x) for x <= 88, within 2 ulp; 0 below -87; NaN stays NaN.
MP_INLINE vf exp(vf x) {
  const vf clamped = select(x < splat(-87.0f), splat(-87.0f), x);
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf shifted = clamped * 1.44269504088896341f + magic;
  const vf n = shifted - magic;
  const vf r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts
  vf g = splat(0.0013941216748207808f);
  g = g * r + 0.00836323481053114f;
  g = g * r + 0.04166637361049652f;
  g = g * r + 0.16666576266288757f;
  g = g * r + 0.5f;
  const vf mantissa = g * (r * r) + r + 1.0f;
  const vi exponent = (vi)shifted - 0x4B400000;
  const vf power = (vf)((exponent + 127) << 23);
  return select(x < splat(-87.0f), vf{}, mantissa * power);
}

// 2^x for x <= 127, within 3 ulp; 0 below -126; NaN stays NaN. Cheaper than exp: for softmax in units of log 2.
MP_INLINE vf exp2(vf x) {
#if defined(__AVX512F__)
  const vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vf clamped = select(x < splat(-126.0f), splat(-126.0f), x);
  const vf magic = splat(12582912.0f), shifted = clamped + magic;  // as in exp
  const vf n = shifted - magic;
#endif
  const vf r = x - n;
  vf p = splat(0.001326472614891827f);
  p = p * r + 0.009671512991189957f;
  p = p * r + 0.05550733581185341f;
  p = p * r + 0.24022242426872253f;
  p = p * r + 0.6931470036506653f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  const __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (vf)_mm512_maskz_scalef_ps(seen, (__m512)p, (__m512)n);
#else
  const vf power = (vf)(((vi)shifted - 0x4B400000 + 127) << 23);
  return select(x < splat(-126.0f), vf{}, p * power);
#endif
}

// tanh(x): a polynomial near zero, where 1 - 2 / (exp(2x) + 1) would cancel.
MP_INLINE vf tanh(vf x) {
  const vf z = x * x;
  vf p = splat(0.0023012009914964437f);
  p = p * z + -0.008352123200893402f;
  p = p * z + 0.02177170105278492f;
  p = p * z + -0.05395964905619621f;
  p = p * z + 0.13333305716514587f;
  p = p * z + -0.3333333432674408f;
  const vf small = x * (p * z) + x;
  const vf size = select(x < vf{}, -x, x);
  const vf bounded = select(size > splat(10.0f), splat(10.0f), size);
  const vf large = 1.0f - 2.0f / (exp(bounded + bounded) + 1.0f);
  return select(size < splat(0.62f), small, select(x < vf{}, -large, large));
}

// exp of a few numbers, in place of the C library: the same code on every platform.
MP_INLINE void exp_few(const float* x, float* y, int n) {
  for (int i = 0; i < n; i += W) {
    const int rest = n - i;
    if (rest >= W)
      store(y + i, exp(load(x + i)));
    else
      store_part(y + i, exp(load_part(x + i, rest)), rest);
  }
}

}  // namespace mp
