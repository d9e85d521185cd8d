// Attention of many queries of one sequence, with column sums, and the column sums of a window of queries alone.
#pragma once

#include "harness.hpp"

namespace check {

struct PrefillCase {
  int64_t n_kv_heads, group, queries, past, key_dim, value_dim, window, reduce;  // value_dim 0: column sums alone
  double softcap, decay;
  bool sink_logits, masses, one_past, lse_given;
};

inline void one_prefill(const Kernels& kernels, Report& report, const PrefillCase& c, int64_t dtype, Random& random) {
  const bool alone = c.value_dim == 0;  // then queries bring no columns of their own
  const int64_t n_heads = c.n_kv_heads * c.group, n = c.past + (alone ? 0 : c.queries);
  Numbers q = normals(dtype, n_heads * c.queries * c.key_dim, random), k = normals(dtype, c.n_kv_heads * n * c.key_dim, random);
  Numbers v = normals(dtype, c.n_kv_heads * n * c.value_dim, random), out(dtype, n_heads * c.queries * c.value_dim);
  const vector<float> sinks = floats(n_heads, random);
  const int64_t past_heads = c.one_past ? 1 : c.n_kv_heads;
  const vector<float> masses = floats(past_heads * c.past, random);
  vector<int32_t> q_pos, past_pos;
  for (int64_t i = 0; i < past_heads * c.past; ++i)
    past_pos.push_back(random.below(9) == 0 ? -1 : int32_t(random.below(3 * c.past)));
  for (int64_t i = 0; i < c.queries; ++i) q_pos.push_back(int32_t((alone ? 2 : 3) * c.past + i));
  vector<float> lse(size_t(n_heads * c.queries)), sums(size_t(c.n_kv_heads * n), 0);
  if (c.lse_given)
    for (float& x : lse) x = float(5 + random.normal());
  const vector<float> known = lse;
  mp::PrefillArgs a{};
  a.q = q.data(), a.k = k.data(), a.v = alone ? nullptr : v.data(), a.q_dtype = a.k_dtype = a.v_dtype = dtype;
  a.q_head = c.queries * c.key_dim, a.q_row = a.k_row = c.key_dim, a.k_head = n * c.key_dim;
  a.v_head = n * c.value_dim, a.v_row = c.value_dim, a.q_pos = q_pos.data();
  a.past_pos = c.past > 0 ? past_pos.data() : nullptr, a.past_row = past_heads > 1 ? c.past : 0;
  a.past_log_masses = c.masses ? masses.data() : nullptr, a.mass_row = a.past_row;
  a.sink_logits = c.sink_logits ? sinks.data() : nullptr, a.out = alone ? nullptr : out.data(), a.lse = lse.data();
  a.sums = sums.data(), a.n_heads = n_heads, a.n_kv_heads = c.n_kv_heads, a.n_queries = c.queries, a.n_columns = n;
  a.n_past = c.past, a.key_dim = c.key_dim, a.value_dim = c.value_dim, a.window = c.window, a.reduce = c.reduce;
  a.n_threads = 2, a.lse_given = c.lse_given, a.scale = 1 / std::sqrt(double(c.key_dim)), a.softcap = c.softcap;
  a.decay = c.decay;
  report.same("the result of prefill", kernels("mp_prefill", a), 0);
  for (int64_t g = 0; g < c.n_kv_heads; ++g) {
    const int64_t past_row = (past_heads > 1 ? g : 0) * c.past;
    vector<double> columns(static_cast<size_t>(n));
    for (int64_t i = 0; i < c.queries; ++i) {
      vector<vector<double>> given(static_cast<size_t>(n));
      for (int64_t h = 0; h < c.group; ++h) {
        const int64_t row = (g * c.group + h) * c.queries + i;
        vector<double> p;
        for (int64_t j = 0; j < n; ++j) {
          const int32_t at = j < c.past ? past_pos[size_t(past_row + j)] : q_pos[size_t(j - c.past)];
          const int32_t age = q_pos[size_t(i)] - at;
          double dot = 0;
          for (int64_t d = 0; d < c.key_dim; ++d) dot += q[row * c.key_dim + d] * k[(g * n + j) * c.key_dim + d];
          const double mass = c.masses && j < c.past ? double(masses[size_t(past_row + j)]) : 0;
          const bool visible = at >= 0 && age >= 0 && (c.window == 0 || age < c.window);
          p.push_back(visible ? soft_cap(dot * a.scale, c.softcap) + mass : -INF);
        }
        if (c.lse_given) {
          for (double& x : p) x = std::exp(x - double(known[size_t(row)]));
        } else {
          const double log = softmax(p, c.sink_logits ? &sinks[size_t(g * c.group + h)] : nullptr);
          if (!alone) report.near("a log-sum-exp", double(lse[size_t(row)]), log);
        }
        for (int64_t d = 0; d < c.value_dim; ++d) {
          double sum = 0;
          for (int64_t j = 0; j < n; ++j) sum += p[size_t(j)] * v[(g * n + j) * c.value_dim + d];
          report.near("an output", out[row * c.value_dim + d], sum);
        }
        for (int64_t j = 0; j < n; ++j) given[size_t(j)].push_back(p[size_t(j)]);
      }
      const double left = std::pow(c.decay, double(c.queries - 1 - i));
      for (int64_t j = 0; j < n; ++j) columns[size_t(j)] += left * reduced(given[size_t(j)], c.reduce);
    }
    for (int64_t j = 0; j < n; ++j) report.near("a column sum", double(sums[size_t(g * n + j)]), columns[size_t(j)]);
  }
}

inline void prefill(const Kernels& kernels, Report& report) {
  using namespace mp;
  const PrefillCase cases[] = {
      {2, 2, 70, 0, 64, 64, 0, MEAN, 0, 1, false, false, false, false},
      {1, 3, 37, 300, 20, 24, 0, MAX, 0, 0.9, true, true, true, false},
      {2, 1, 13, 150, 33, 7, 60, ADD, 30, 1, false, true, false, false},
      {1, 4, 1, 200, 128, 96, 0, MEAN, 0, 1, true, false, false, false},
      {1, 5, 29, 17, 144, 16, 0, MAX, 0, 1, false, false, false, false},
      {2, 2, 9, 130, 64, 0, 0, MEAN, 0, 1, true, true, false, false},
      {2, 3, 8, 90, 20, 0, 50, MAX, 20, 1, false, false, true, true},
  };
  for (const int64_t dtype : DTYPES) {
    Random random{uint64_t(dtype + 21)};
    report.begin(with_type("prefill and column sums", dtype), tolerance_of(dtype));
    for (const PrefillCase& c : cases) one_prefill(kernels, report, c, dtype, random);
    report.end();
  }
}

}  // namespace check
