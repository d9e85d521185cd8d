// The softmax of a row of logits, a stretch of columns at a time. Logits and their maxima are in units of log 2.
#pragma once

#include <algorithm>

#include "common/maths.hpp"

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

// Weights 2^(scale * s - top) of R <= 4 rows to `weights`, and to s itself if `keep`. Raises `top` (R,) to the maxima;
// `sums` (R,): those of the weights. scale > 0; n: a multiple of W. Rows go together since each waits for its maximum.
template <int R, class T>
void soften(float* s, int64_t s_row, T* weights, int64_t w_row, int n, float scale, bool keep, float* top, float* sums) {
  vf best[4], total[4];
  for (int r = 0; r < 4; ++r) best[r] = load(s + (r < R ? r : 0) * s_row), total[r] = vf{};
  for (int i = W; i < n; i += W)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) best[r] = vmax(load(s + r * s_row + i), best[r]);
  const v4f most = max4(best[0], best[1], best[2], best[3]);
  vf tops[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) top[r] = std::max(top[r], most[r] * scale), tops[r] = splat(top[r]);
  for (int i = 0; i < n; i += W)
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf weight = exp2(load(s + r * s_row + i) * scale - tops[r]);
      total[r] += weight;
      put(weights + r * w_row + i, weight);
      if (keep) store(s + r * s_row + i, weight);
    }
  const v4f added = sum4(total[0], total[1], total[2], total[3]);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums[r] = added[r];
}

}  // namespace mp
