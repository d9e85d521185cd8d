// What happens to the products of a few rows before they are stored.
#pragma once

#include <cmath>

#include "common/convert.hpp"
#include "common/maths.hpp"
#include "common/norm.hpp"

namespace mp {

MP_INLINE vf silu(vf x) {
  const vf size = select(x < vf{}, x, -x);  // -|x|, so that exp stays finite
  const vf e = exp(size);
  return select(x < vf{}, x * e, x) / (1.0f + e);
}

MP_INLINE vf gelu_tanh(vf x) {
  return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * (x * x * x))));
}

// x = act(x), n numbers, rounded to `dtype` before and behind.
inline void activate(float* x, int64_t act, int64_t dtype, int n) {
  round_to(x, dtype, n);
  if (act == RELU) {
    for (int i = 0; i < n; ++i) x[i] = x[i] < 0.0f ? 0.0f : x[i];
    return;
  }
  if (act == GELU) {
    for (int i = 0; i < n; ++i) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678118654752f));
  } else {
    for (int i = 0; i < n; i += W) {
      const vf v = n - i >= W ? load(x + i) : load_part(x + i, n - i);
      const vf y = act == SILU ? silu(v) : gelu_tanh(v);
      if (n - i >= W)
        store(x + i, y);
      else
        store_part(x + i, y, n - i);
    }
  }
  round_to(x, dtype, n);
}

// gate = act(gate) * up, n numbers; each of the three is rounded to `dtype` on the way.
inline void open_gate(float* gate, float* up, int64_t act, int64_t dtype, int n) {
  activate(gate, act, dtype, n);
  round_to(up, dtype, n);
  for (int i = 0; i < n; ++i) gate[i] *= up[i];
}

// sums, rounded to `dtype`, plus what stands at `from`: n <= 64 numbers.
inline void add(float* sums, const void* from, int64_t dtype, int n) {
  float other[64];
  widen(other, from, dtype, n);
  round_to(sums, dtype, n);
  for (int i = 0; i < n; ++i) sums[i] += other[i];
}

}  // namespace mp
