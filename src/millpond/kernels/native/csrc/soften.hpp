// The softmax of a row of logits, a stretch of columns at a time. Logits and their maxima are in units of log 2.
#pragma once

#include <algorithm>

#include "maths.hpp"

namespace mp {

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float NOTHING = -1e30f;       // the maximum over nothing: finite, so that differences stay finite
constexpr int32_t NOWHERE = INT32_MIN;  // the position of a column that nobody sees

// What one query sees: positions p with after < p <= upto.
struct Sight {
  int32_t after, upto;
  Sight(int64_t window, int32_t position)
      : after(window > 0 ? int32_t(std::max<int64_t>(NOWHERE, position - window)) : NOWHERE), upto(position) {}
};

// Products to logits: scaled, capped if softcap is not 0, `bias` (if not null) added, -inf where the positions (if not
// null) are out of sight.
inline void settle_logits(float* s, int n, float scale, float softcap, const float* bias, const int32_t* positions,
                          const Sight& sight) {
  const bool caps = softcap != 0;
  const vf inner = splat(caps ? scale / softcap : 0.0f), outer = splat((caps ? softcap : scale) * LOG2_E);
  for (int i = 0; i < n; i += W) {
    vf x = load(s + i);
    x = (caps ? tanh(x * inner) : x) * outer;
    if (bias != nullptr) x = x + load(bias + i);
    if (positions != nullptr) {
      const vi at = load(positions + i);
      x = select((at > sight.after) & (at <= sight.upto), x, splat(-__builtin_inff()));
    }
    store(s + i, x);
  }
}

MP_INLINE void put(float* to, vf x) { store(to, x); }
#if defined(__AVX512BF16__)
MP_INLINE void put(bf16* to, vf x) {
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &rounded, sizeof rounded);
}
#endif

// Weights 2^(scale * s - top) to `weights`, and to s itself if `keep`. Raises `top` to the maximum; returns the sum of
// the weights. scale > 0; n: a multiple of W.
template <class T>
float soften(float* s, T* weights, int n, float scale, bool keep, float& top) {
  vf best = load(s);
  for (int i = W; i < n; i += W) best = vmax(load(s + i), best);
  top = std::max(top, max(best) * scale);
  vf total{};
  for (int i = 0; i < n; i += W) {
    const vf weight = exp2(load(s + i) * scale - top);
    total += weight;
    put(weights + i, weight);
    if (keep) store(s + i, weight);
  }
  return sum(total);
}

}  // namespace mp
