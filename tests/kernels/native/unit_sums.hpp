// Attention to tokens of a query's own unit, as plain loops add it.
#pragma once

#include "harness.hpp"

namespace check {

inline void unit_sums(const Kernels& kernels, Report& report, int64_t dtype, int64_t n, int64_t begin, int64_t unit,
                      int64_t step, int64_t least, int64_t dim, int64_t window, double softcap) {
  Random random{uint64_t(n * 1000 + begin)};
  const int64_t kv_heads = 2, group = 3, n_queries = n - begin, first = begin - begin % unit;
  Numbers q = normals(dtype, kv_heads * group * n_queries * dim, random), k = normals(dtype, kv_heads * n * dim, random);
  const vector<float> lse = floats(kv_heads * group * n_queries, random);
  vector<float> sums = floats(kv_heads * (n - first), random);
  vector<double> wanted(sums.begin(), sums.end());
  const double scale = 1 / std::sqrt(double(dim));
  for (int64_t h = 0; h < kv_heads * group; ++h)
    for (int64_t p = begin; p < n; ++p)
      for (int64_t t = p - p % unit; p % step == step - 1 && t <= p - least; ++t) {
        if (window > 0 && p - t >= window) continue;
        double logit = 0;
        for (int64_t d = 0; d < dim; ++d)
          logit += q[(h * n_queries + p - begin) * dim + d] * k[(h / group * n + t) * dim + d];
        const double less = double(lse[size_t(h * n_queries + p - begin)]);
        const double got = std::exp(std::min(0.0, soft_cap(logit * scale, softcap) - less));
        wanted[size_t(h / group * (n - first) + t - first)] += got / double(group);
      }
  const mp::UnitSumsArgs a{q.data(),  k.data(),         lse.data(), sums.data(), dtype,     dtype, n_queries * dim,
                           dim,       n * dim,          dim,        n_queries,   1,         n - first,
                           kv_heads * group, kv_heads,  n_queries,  n,           dim,       unit,  step,
                           least, window,    2,                scale,      softcap};
  report.same("the result", kernels("mp_unit_sums", a), 0);
  for (size_t i = 0; i < sums.size(); ++i) report.near("a sum", double(sums[i]), wanted[i]);
}

inline void unit_sums(const Kernels& kernels, Report& report) {
  report.begin("sums of attention by units", 1e-5);
  for (const int64_t dtype : DTYPES) unit_sums(kernels, report, dtype, 150, 20, 64, 4, 1, 40, 0, 0);
  unit_sums(kernels, report, mp::F32, 520, 0, 256, 16, 32, 64, 0, 0);
  unit_sums(kernels, report, mp::F32, 45, 33, 32, 2, 3, 160, 7, 1.5);
  unit_sums(kernels, report, mp::F32, 300, 270, 256, 1, 1, 5, 0, 0);
  report.end();
}

}  // namespace check
