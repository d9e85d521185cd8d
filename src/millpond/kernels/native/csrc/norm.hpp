// RMSNorm of a row.
#pragma once

#include <cmath>

#include "convert.hpp"

namespace mp {

// to = x / sqrt(mean(x^2) + eps), rounded to `dtype`, times weight, rounded again: n numbers.
inline void normalise(float* to, const void* x, const void* weight, int64_t dtype, int n, float eps) {
  widen(to, x, dtype, n);
  vf squares[4] = {};
  int i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; ++j) {
      const vf v = load(to + i + j * W);
      squares[j] = squares[j] + v * v;
    }
  float total = sum(squares[0] + squares[1] + (squares[2] + squares[3]));
  for (; i < n; ++i) total += to[i] * to[i];
  const float scale = 1.0f / std::sqrt(total / float(n) + eps);
  for (int j = 0; j < n; ++j) to[j] *= scale;
  round_to(to, dtype, n);
  constexpr int PART = 64;
  float part[PART];
  for (int j = 0; j < n; j += PART) {
    const int m = n - j < PART ? n - j : PART;
    widen(part, static_cast<const char*>(weight) + j * dtype_bytes(dtype), dtype, m);
    for (int t = 0; t < m; ++t) to[j + t] *= part[t];
  }
  round_to(to, dtype, n);
}

}  // namespace mp
