// Scans of all pairs of entries, and entries that are taken in by others.
#pragma once

#include <map>

#include "harness.hpp"

namespace check {

// The cosine of two of the rows (dim,) of x.
inline double cosine(const Numbers& x, int64_t i, int64_t j, int64_t dim) {
  double dot = 0, own = 0, other = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const double a = x[i * dim + d], b = x[j * dim + d];
    dot += a * b, own += a * a, other += b * b;
  }
  return dot / std::sqrt(own * other);
}

inline void scans(const Kernels& kernels, Report& report, int64_t dtype, int64_t dim, Random& random) {
  const int64_t heads = 2, n = 150, sets = 2, others = 21, most = 3;
  Numbers x = normals(dtype, heads * n * dim, random), y = normals(dtype, heads * sets * others * dim, random);
  vector<float> sums(size_t(heads * n)), cosines(size_t(heads * n * most));
  mp::ScanArgs a{};
  a.x = x.data(), a.y = y.data(), a.x_dtype = a.y_dtype = dtype, a.x_head = n * dim, a.x_row = a.y_row = dim;
  a.y_head = others * dim, a.n_heads = heads, a.n_rows = n, a.n_sets = sets, a.n_others = others, a.dim = dim;
  a.sums = sums.data(), a.n_threads = 2;
  report.same("the result of absolute_sums", kernels("mp_absolute_sums", a), 0);
  for (int64_t i = 0; i < heads * n; ++i) {
    double total = 0;
    for (int64_t j = i / n * sets * others; j < (i / n + 1) * sets * others; ++j) {
      double dot = 0;
      for (int64_t d = 0; d < dim; ++d) dot += x[i * dim + d] * y[j * dim + d];
      total += std::fabs(dot);
    }
    report.near("a sum of products", double(sums[size_t(i)]), total);
  }
  const int64_t row = (n + 127) / 128 * 128;
  const double threshold = 1.2 / std::sqrt(double(dim));
  vector<float> scales(size_t(heads * row), 0);
  for (int64_t i = 0; i < heads * n; ++i) {
    double squares = 0;
    for (int64_t d = 0; d < dim; ++d) squares += x[i * dim + d] * x[i * dim + d];
    scales[size_t(i / n * row + i % n)] = float(1 / std::sqrt(squares));
  }
  const vector<int32_t> lens{int32_t(n), 70};
  vector<int32_t> at(size_t(heads * n * most), -1);
  a.y = x.data(), a.y_head = n * dim, a.n_sets = 1, a.n_others = n, a.sums = nullptr, a.scales = scales.data();
  a.scale_head = row, a.lens = lens.data(), a.at = at.data(), a.cosines = cosines.data(), a.most = most, a.threshold = threshold;
  report.same("the result of newest_alike", kernels("mp_newest_alike", a), 0);
  for (int64_t i = 0; i < heads * n; ++i) {
    const int64_t h = i / n, len = lens[size_t(h)];
    int64_t found = 0;
    for (int64_t j = len - 1; j >= 0 && found < most && i % n < len; --j) {
      const double c = cosine(x, i, h * n + j, dim);
      if (j == i % n || c <= threshold) continue;
      report.same("who is alike", at[size_t(i * most + found)], j);
      report.near("a cosine", double(cosines[size_t(i * most + found)]), c);
      ++found;
    }
    for (; found < most; ++found) report.same("nobody who is alike", at[size_t(i * most + found)], -1);
  }
}

inline void links(const Kernels& kernels, Report& report, int64_t dtype, bool both, Random& random) {
  const int64_t heads = 2, n = 130, dim = 40, value_dim = 24;
  Numbers keys = normals(dtype, heads * n * dim, random), values = normals(dtype, heads * n * value_dim, random);
  vector<uint8_t> sources, targets;
  for (int64_t i = 0; i < heads * n; ++i) {
    const int64_t kind = random.below(4);
    sources.push_back(kind == 0), targets.push_back(kind == 1 || kind == 2);
  }
  vector<int64_t> into(sources.size());
  vector<double> alike(sources.size());
  mp::NearestArgs a{};
  a.keys = keys.data(), a.values = both ? values.data() : nullptr, a.k_dtype = a.v_dtype = dtype;
  a.k_head = n * dim, a.k_row = dim, a.v_head = n * value_dim, a.v_row = value_dim, a.sources = sources.data();
  a.targets = targets.data(), a.into = into.data(), a.alike = alike.data(), a.n_heads = heads, a.n = n, a.key_dim = dim;
  a.value_dim = both ? value_dim : 0, a.n_threads = 2, a.floor = both ? 0 : -INF;
  report.same("the result of nearest", kernels("mp_nearest", a), 0);
  for (int64_t i = 0; i < heads * n; ++i) {
    const int64_t first = i / n * n;
    const auto likeness = [&](int64_t j) {
      const double k = cosine(keys, i, j, dim), v = both ? cosine(values, i, j, value_dim) : 1;
      return !both ? k : k > 0 && v > 0 ? k * v : -1;
    };
    double best = -INF;
    for (int64_t j = first; j < first + n && sources[size_t(i)]; ++j)
      if (targets[size_t(j)]) best = std::max(best, likeness(j));
    if (best <= a.floor || !sources[size_t(i)]) {
      report.same("who takes in what has no target", into[size_t(i)], i % n);
      continue;
    }
    report.near("the largest likeness", alike[size_t(i)], best);
    report.same("whether it is a target", targets[size_t(first + into[size_t(i)])], 1);
    report.near("the likeness of the chosen one", likeness(first + into[size_t(i)]), best);
  }
  vector<double> weight, own;
  for (size_t i = 0; i < sources.size(); ++i) weight.push_back(random.uniform()), own.push_back(0.1 + random.uniform());
  vector<uint8_t> leaves;
  for (int64_t i = 0; i < heads * n; ++i) leaves.push_back(sources[size_t(i)] && into[size_t(i)] != i % n);
  vector<float> out(size_t(heads * n * dim));
  const mp::MeanArgs b{keys.data(), dtype, n * dim, dim, weight.data(), own.data(), into.data(), leaves.data(), out.data(),
                       heads, n, dim, 2};
  report.same("the result of mean_rows", kernels("mp_mean_rows", b), 0);
  for (int64_t i = 0; i < heads * n; ++i)
    for (int64_t d = 0; d < dim; ++d) {
      double total = own[size_t(i)], sum = total * keys[i * dim + d];
      for (int64_t j = i / n * n; j < (i / n + 1) * n; ++j)
        if (leaves[size_t(j)] && i / n * n + into[size_t(j)] == i)
          total += weight[size_t(j)], sum += weight[size_t(j)] * keys[j * dim + d];
      report.near("a mean", double(out[size_t(i * dim + d)]), sum / total);
    }
}

struct Merged {
  vector<double> key, value;
  double score, mass;
  bool pinned;
};

// Regions above their caps: NORMS with a fixed threshold, or EXP with one that moves.
inline void merge_slots(const Kernels& kernels, Report& report, int64_t dtype, int64_t weigh, Random& random) {
  const int64_t n_kv_heads = 2, dim = 20, value_dim = 24, closed = 3, sinks = 2;
  const vector<int32_t> before{60, 41}, caps{45, 41 - 7}, recent{5, 5}, q_pos{200};
  const Pages pages(n_kv_heads, 60, 16, dim, value_dim, dtype, true, random);
  vector<std::map<int32_t, Merged>> entries;  // by position
  for (int64_t r = 0; r < n_kv_heads; ++r) {
    pages.fill(r, before[size_t(r)], random);
    entries.emplace_back();
    for (int64_t i = 0; i < before[size_t(r)]; ++i) {
      const int32_t at = pages.position(r, i);
      Merged e{{}, {}, double(pages.score(r, i)), std::exp(double(pages.log_mass(r, i))),
               at < sinks || q_pos[0] - at < recent[size_t(r)]};
      for (int64_t d = 0; d < dim; ++d) e.key.push_back(pages.key(r, i, d));
      for (int64_t d = 0; d < value_dim; ++d) e.value.push_back(pages.value(r, i, d));
      entries.back()[at] = e;
    }
  }
  vector<int32_t> lens = before;
  double memory = NAN;
  mp::MergeArgs a{};
  a.pool = pages.args(), a.table = pages.table.data(), a.table_row = pages.per_region, a.lens = lens.data();
  a.caps = caps.data(), a.recent = recent.data(), a.q_pos = q_pos.data(), a.memory = &memory, a.n_seq = 1;
  a.n_kv_heads = n_kv_heads, a.evict = mp::ACC, a.sinks = sinks, a.weigh = weigh, a.closed = closed, a.uses_masses = 1;
  a.n_threads = 2, a.threshold = 0.25, a.rate = 0.7, a.cover = 1, a.most = 1;
  report.same("the result of merge_slots", kernels("mp_merge_slots", a), 0);

  const auto like = [](const vector<double>& x, const vector<double>& y) {
    double dot = 0, own = 0, other = 0;
    for (size_t d = 0; d < x.size(); ++d) dot += x[d] * y[d], own += x[d] * x[d], other += y[d] * y[d];
    return dot / std::sqrt(own * other);
  };
  const auto length = [](const vector<double>& x) {
    double squares = 0;
    for (const double y : x) squares += y * y;
    return std::sqrt(squares);
  };
  struct Link {
    int64_t region;
    int32_t from, into;
    double alike;
  };
  vector<Link> found;
  double mean = 0;
  for (int64_t r = 0; r < n_kv_heads; ++r) {
    vector<std::pair<double, int32_t>> order;
    for (const auto& [at, e] : entries[size_t(r)]) order.emplace_back(e.pinned ? INF : e.score, at);
    std::sort(order.begin(), order.end());
    const size_t leaving = size_t(before[size_t(r)] - caps[size_t(r)]);
    for (size_t i = 0; i < leaving; ++i) {
      Link link{r, order[i].second, -1, -INF};
      const Merged& e = entries[size_t(r)][link.from];
      for (size_t j = leaving; j < order.size(); ++j) {
        const double c = like(e.key, entries[size_t(r)][order[j].second].key);
        if (order[j].second >= closed && c > link.alike) link.alike = c, link.into = order[j].second;
      }
      found.push_back(link), mean += link.alike;
    }
  }
  mean /= double(found.size());
  if (weigh == mp::BY_EXP) report.near("the threshold", memory, mean);
  vector<std::map<int32_t, Merged>> after = entries;
  std::map<std::pair<int64_t, int32_t>, std::pair<double, double>> totals;  // of weights, of masses
  for (const Link& link : found) {
    auto& region = after[size_t(link.region)];
    region.erase(link.from);
    if (link.alike < (weigh == mp::BY_EXP ? mean - 1e-6 : a.threshold)) continue;
    const Merged &e = entries[size_t(link.region)][link.from], &to = entries[size_t(link.region)][link.into];
    const double own = weigh == mp::BY_EXP ? to.mass * M_E : to.mass, norms = length(e.value) + length(to.value);
    const double weight = e.mass * (weigh == mp::BY_EXP ? std::exp(link.alike) : link.alike * length(e.value) / norms);
    auto [at, is_new] = totals.try_emplace({link.region, link.into}, own, to.mass);
    Merged& sum = region[link.into];
    for (size_t d = 0; d < sum.value.size(); ++d) sum.value[d] = sum.value[d] * (is_new ? own : 1) + weight * e.value[d];
    for (size_t d = 0; d < sum.key.size() && weigh == mp::BY_EXP; ++d)
      sum.key[d] = sum.key[d] * (is_new ? own : 1) + weight * e.key[d];
    at->second.first += weight, at->second.second += e.mass;
  }
  for (const auto& [where, total] : totals) {
    Merged& sum = after[size_t(where.first)][where.second];
    for (double& x : sum.value) x /= total.first;
    for (double& x : sum.key) x /= weigh == mp::BY_EXP ? total.first : 1;
    sum.mass = total.second;
  }
  for (int64_t r = 0; r < n_kv_heads; ++r) {
    report.same("a length", lens[size_t(r)], caps[size_t(r)]);
    for (int64_t i = 0; i < lens[size_t(r)]; ++i) {
      const auto e = after[size_t(r)].find(pages.position(r, i));
      report.same("whether an entry was to stay", e != after[size_t(r)].end(), 1);
      if (e == after[size_t(r)].end()) continue;
      report.near("a score", double(pages.score(r, i)), e->second.score);
      report.near("a log mass", double(pages.log_mass(r, i)), std::log(e->second.mass));
      for (int64_t d = 0; d < dim; ++d) report.near("a merged key", pages.key(r, i, d), e->second.key[size_t(d)]);
      for (int64_t d = 0; d < value_dim; ++d) report.near("a merged value", pages.value(r, i, d), e->second.value[size_t(d)]);
    }
  }
}

inline void merging(const Kernels& kernels, Report& report) {
  for (const int64_t dtype : DTYPES) {
    Random random{uint64_t(dtype + 61)};
    report.begin(with_type("scans and merging", dtype), tolerance_of(dtype));
    for (const int64_t dim : {64, 37}) scans(kernels, report, dtype, dim, random);
    for (const bool both : {false, true}) links(kernels, report, dtype, both, random);
    for (const int64_t weigh : {mp::BY_NORMS, mp::BY_EXP}) merge_slots(kernels, report, dtype, weigh, random);
    report.end();
  }
}

}  // namespace check
