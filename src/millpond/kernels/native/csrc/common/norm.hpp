// RMSNorm and LayerNorm of a row.
#pragma once

#include <cmath>

#include "common/convert.hpp"

namespace mp {

// The sum of n squares.
inline float sum_of_squares(const float* x, int n) {
  vf squares[4] = {};
  int i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; ++j) {
      const vf v = load(x + i + j * W);
      squares[j] = squares[j] + v * v;
    }
  float total = sum(squares[0] + squares[1] + (squares[2] + squares[3]));
  for (; i < n; ++i) total += x[i] * x[i];
  return total;
}

inline float sum_of(const float* x, int n) {
  vf sums[4] = {};
  int i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; ++j) sums[j] = sums[j] + load(x + i + j * W);
  float total = sum(sums[0] + sums[1] + (sums[2] + sums[3]));
  for (; i < n; ++i) total += x[i];
  return total;
}

// What a norm multiplies with and adds, if anything: (n,) each, null for none; eps; and whether the mean goes first.
struct Norm {
  const void *weight, *bias;
  int64_t centred;
  float eps;
};

// RMSNorm: to = x / sqrt(mean(x^2) + eps), rounded to `dtype`, times weight, rounded again: n numbers.
// LayerNorm: to = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias, rounded once.
inline void normalise(float* to, const void* x, const Norm& norm, int64_t dtype, int n) {
  widen(to, x, dtype, n);
  if (norm.centred) {
    const float mean = sum_of(to, n) / float(n);
    for (int j = 0; j < n; ++j) to[j] -= mean;
  }
  const float scale = 1.0f / std::sqrt(sum_of_squares(to, n) / float(n) + norm.eps);
  for (int j = 0; j < n; ++j) to[j] *= scale;
  if (!norm.centred) round_to(to, dtype, n);
  constexpr int PART = 64;
  float part[PART];
  const char *weight = static_cast<const char*>(norm.weight), *bias = static_cast<const char*>(norm.bias);
  for (int j = 0; j < n; j += PART) {
    const int m = n - j < PART ? n - j : PART;
    const int64_t at = j * dtype_bytes(dtype);
    if (weight != nullptr) {
      widen(part, weight + at, dtype, m);
      for (int t = 0; t < m; ++t) to[j + t] *= part[t];
    }
    if (bias != nullptr) {
      widen(part, bias + at, dtype, m);
      for (int t = 0; t < m; ++t) to[j + t] += part[t];
    }
  }
  round_to(to, dtype, n);
}

}  // namespace mp
