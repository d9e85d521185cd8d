// Attention of many sequences to entries that they share, put together with what they found elsewhere.
#pragma once

#include "harness.hpp"

namespace check {

inline void one_shared_prefix(const Kernels& kernels, Report& report, int64_t dtype, int64_t q_dtype, int64_t n_seq,
                              int64_t group, int64_t key_dim, int64_t value_dim, int64_t slots, double softcap,
                              bool masses, const vector<int32_t>& lens, Random& random) {
  const int64_t n_kv_heads = int64_t(lens.size()), n_heads = n_kv_heads * group;
  const Pages pages(n_kv_heads, *std::max_element(lens.begin(), lens.end()), slots, key_dim, value_dim, dtype, masses, random);
  for (int64_t h = 0; h < n_kv_heads; ++h) pages.fill(h, lens[size_t(h)], random);
  Numbers q = normals(q_dtype, n_seq * n_heads * key_dim, random), out = normals(q_dtype, n_seq * n_heads * value_dim, random);
  vector<float> lse;
  for (int64_t i = 0; i < n_seq * n_heads; ++i) lse.push_back(i % 3 == 0 ? -float(INF) : float(3 + random.normal()));
  vector<int64_t> members;  // all but the second, last first
  for (int64_t s = n_seq - 1; s >= 0; --s)
    if (s != 1) members.push_back(s);
  const Numbers before = out;
  const vector<float> lse_before = lse;
  const double scale = 1 / std::sqrt(double(key_dim));
  const mp::AttendArgs a{pages.args(), q.data(), q_dtype, n_heads * key_dim, key_dim, pages.table.data(),
                         pages.per_region, lens.data(), members.data(), out.data(), q_dtype, lse.data(),
                         int64_t(members.size()), n_heads, n_kv_heads, 2, scale, softcap};
  report.same("the result of attend", kernels("mp_attend", a), 0);
  for (int64_t s = 0; s < n_seq; ++s)
    for (int64_t h = 0; h < n_heads; ++h) {
      const int64_t row = s * n_heads + h, g = h / group;
      const double found = double(lse_before[size_t(row)]);
      vector<double> p;
      for (int64_t j = 0; j < lens[size_t(g)] && s != 1; ++j) {
        double dot = 0;
        for (int64_t d = 0; d < key_dim; ++d) dot += q[row * key_dim + d] * pages.key(g, j, d);
        p.push_back(soft_cap(dot * scale, softcap) + (masses ? double(pages.log_mass(g, j)) : 0));
      }
      p.push_back(found);  // what was found elsewhere is one more entry
      const double log = softmax(p, nullptr);
      report.near("a log-sum-exp", double(lse[size_t(row)]), log);
      for (int64_t d = 0; d < value_dim; ++d) {
        double sum = s == 1 || p.size() == 1 ? before[row * value_dim + d] : p.back() * before[row * value_dim + d];
        for (int64_t j = 0; j + 1 < int64_t(p.size()); ++j) sum += p[size_t(j)] * pages.value(g, j, d);
        report.near("an output", out[row * value_dim + d], sum);
      }
    }
}

inline void shared_prefix(const Kernels& kernels, Report& report) {
  for (const int64_t dtype : DTYPES) {
    Random random{uint64_t(dtype + 31)};
    report.begin(with_type("attention to a shared prefix", dtype), tolerance_of(dtype));
    for (const int64_t q_dtype : {dtype, int64_t(mp::F32)}) {
      one_shared_prefix(kernels, report, dtype, q_dtype, 5, 4, 64, 64, 64, 0, false, {200, 61}, random);
      one_shared_prefix(kernels, report, dtype, q_dtype, 3, 3, 20, 24, 8, 30, true, {33, 0, 130}, random);
    }
    one_shared_prefix(kernels, report, dtype, dtype, 9, 1, 128, 80, 32, 0, true, {1100}, random);
    report.end();
  }
}

}  // namespace check
