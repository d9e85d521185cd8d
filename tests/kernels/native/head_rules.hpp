// Heads with nested rules: special tokens, then punctuation, then the most frequent, then the newest, then everything.
#pragma once

#include <set>

#include "harness.hpp"

namespace check {

inline void head_rules(const Kernels& kernels, Report& report) {
  report.begin("rules of heads", 0);
  Random random{71};
  const int64_t n_kv_heads = 5, n = 90, sinks = 3, quota = 12, width = 200;
  const Pages pages(n_kv_heads, n, 16, 16, 16, mp::F32, true, random);
  vector<int64_t> ids, kinds{0, 1, 2, 3, 4}, sequences{0};
  const vector<uint8_t> classes{0, 1, 2, 0, 0, 0};
  for (int64_t i = 0; i < width; ++i) ids.push_back(random.below(7));
  vector<int32_t> lens(n_kv_heads, int32_t(n)), local(n_kv_heads, 20);
  const int64_t seen = width, most = 1000;
  vector<std::set<int32_t>> stay;
  for (int64_t h = 0; h < n_kv_heads; ++h) {
    pages.fill(h, n, random);
    stay.emplace_back();
    vector<std::pair<float, int32_t>> frequent;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t at = pages.position(h, i);
      const uint8_t kind = at < sinks ? 2 : classes[size_t(std::min<int64_t>(ids[size_t(at)], 5))];
      if (kind == 2 || (kind == 1 && h >= 1) || (h >= 3 && seen - at <= 20) || h == 4)
        stay.back().insert(at);
      else
        frequent.emplace_back(pages.score(h, i), at);
    }
    std::sort(frequent.begin(), frequent.end());
    for (int64_t i = 0; i < quota && h >= 2 && i < int64_t(frequent.size()); ++i)
      stay.back().insert(frequent[frequent.size() - 1 - size_t(i)].second);
  }
  mp::AdmitArgs a{};
  a.pool = pages.args(), a.table = pages.table.data(), a.table_row = pages.per_region, a.lens = lens.data();
  a.sequences = sequences.data(), a.ids = ids.data(), a.ids_row = width, a.classes = classes.data();
  a.n_classes = int64_t(classes.size()), a.kinds = kinds.data(), a.local = local.data(), a.seen = &seen, a.quota = &quota;
  a.most = &most, a.n_sequences = 1, a.n_kv_heads = n_kv_heads, a.sinks = sinks;
  report.same("the result of admit", kernels("mp_admit", a), 0);
  for (int64_t h = 0; h < n_kv_heads; ++h) {
    report.same("a length", lens[size_t(h)], int64_t(stay[size_t(h)].size()));
    for (int64_t i = 0; i < lens[size_t(h)]; ++i)
      report.same("whether an entry was to stay", int64_t(stay[size_t(h)].count(pages.position(h, i))), 1);
  }
  report.end();
}

}  // namespace check
