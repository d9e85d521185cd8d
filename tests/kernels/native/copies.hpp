// Rows into pages and out of them: no number may change but by rounding to the pages' type.
#pragma once

#include "harness.hpp"

namespace check {

inline void copies(const Kernels& kernels, Report& report, int64_t dtype, int64_t source) {
  Random random{uint64_t(7 + dtype * 3 + source)};
  const int64_t n_regions = 3, rows = 300, width = 290, start = 5, dims[2] = {20, 64};
  for (const int64_t key_dim : dims) {
    const Pages pages(n_regions, start + width, 16, key_dim, 24, dtype, true, random);
    Numbers keys = normals(source, n_regions * rows * key_dim, random), values = normals(source, n_regions * rows * 24, random);
    vector<float> scores = floats(n_regions * rows, random), masses = floats(n_regions * rows, random);
    vector<int32_t> positions, index, starts, counts{int32_t(width), 0, 17}, lens;
    for (int64_t i = 0; i < n_regions * rows; ++i) positions.push_back(int32_t(random.below(100000)));
    for (int64_t i = 0; i < n_regions * width; ++i) index.push_back(int32_t(random.below(rows)));
    for (int64_t r = 0; r < n_regions; ++r) starts.push_back(start), lens.push_back(start + counts[size_t(r)]);
    mp::WriteArgs a{};
    a.pool = pages.args(), a.table = pages.table.data(), a.table_row = pages.per_region, a.n_regions = n_regions;
    a.start = starts.data(), a.count = counts.data(), a.index = index.data(), a.index_row = a.width = width;
    a.keys = keys.data(), a.values = values.data(), a.positions = positions.data(), a.scores = scores.data();
    a.log_masses = masses.data(), a.k_dtype = a.v_dtype = source, a.k_region = rows * key_dim, a.k_row = key_dim;
    a.v_region = rows * 24, a.v_row = 24, a.p_region = a.s_region = a.m_region = rows, a.p_row = a.s_row = a.m_row = 1;
    a.n_threads = 2;
    report.same("the result of write", kernels("mp_write", a), 0);
    const int64_t wide = start + width + 3;
    Numbers k(dtype, n_regions * wide * key_dim), v(dtype, n_regions * wide * 24);
    vector<int32_t> p(size_t(n_regions * wide));
    vector<float> s(p.size()), m(p.size());
    const mp::ReadArgs b{pages.args(), pages.table.data(), pages.per_region, n_regions, lens.data(), wide,
                         k.data(), v.data(), p.data(), s.data(), m.data(), 2};
    report.same("the result of read", kernels("mp_read", b), 0);
    for (int64_t r = 0; r < n_regions; ++r)
      for (int64_t i = start; i < wide; ++i) {
        const int64_t to = r * wide + i;
        const bool there = i < lens[size_t(r)];
        const int64_t from = there ? r * rows + index[size_t(r * width + i - start)] : 0;
        report.same("a position", p[size_t(to)], there ? positions[size_t(from)] : -1);
        report.near("a score", double(s[size_t(to)]), there ? double(scores[size_t(from)]) : 0);
        report.near("a log mass", double(m[size_t(to)]), there ? double(masses[size_t(from)]) : 0);
        for (int64_t d = 0; d < key_dim; ++d)
          report.near("a key", k[to * key_dim + d], there ? rounded(keys[from * key_dim + d], dtype) : 0);
        for (int64_t d = 0; d < 24; ++d)
          report.near("a value", v[to * 24 + d], there ? rounded(values[from * 24 + d], dtype) : 0);
      }
  }
}

inline void copies(const Kernels& kernels, Report& report) {
  for (const int64_t dtype : DTYPES) {
    report.begin(with_type("write and read", dtype), 0);
    for (const int64_t source : DTYPES) copies(kernels, report, dtype, source);
    report.end();
  }
}

}  // namespace check
