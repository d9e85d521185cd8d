// One decoding step: attention, signal, and the entry that leaves.
#pragma once

#include "harness.hpp"

namespace check {

struct DecodeCase {
  int64_t group, key_dim, value_dim, slots, signal, reduce, evict;
  vector<int32_t> lens;  // (S * Hkv,)
  int64_t n_kv_heads, window, sinks;
  double softcap, decay;
  bool sink_logits, masses, full, shared;
};

// A step of a case, its arguments and what they point at. `packed`, `extra`: see packed.hpp.
struct DecodeStep {
  const DecodeCase& c;
  int64_t n_regions, n_seq, n_heads;
  Pages pages;
  Numbers q, k, v, out;
  vector<int32_t> lens, caps, recent, q_pos, evicted;
  vector<float> sink_logits, lse;

  DecodeStep(const DecodeCase& a_case, int64_t dtype, int64_t q_dtype, Random& random)
      : c(a_case), n_regions(int64_t(c.lens.size())), n_seq(n_regions / c.n_kv_heads), n_heads(c.n_kv_heads * c.group),
        pages(n_regions, *std::max_element(c.lens.begin(), c.lens.end()) + 1, c.slots, c.key_dim, c.value_dim, dtype,
              c.masses, random),
        q(normals(q_dtype, n_seq * n_heads * c.key_dim, random)), k(normals(q_dtype, n_regions * c.key_dim, random)),
        v(normals(q_dtype, n_regions * c.value_dim, random)), out(q_dtype, n_seq * n_heads * c.value_dim), lens(c.lens),
        recent(size_t(n_regions), 3), q_pos(size_t(n_seq)), evicted(size_t(n_regions)),
        sink_logits(floats(n_heads, random)), lse(size_t(n_seq * n_heads)) {
    if (dtype == mp::BF16)  // kernels may round the query to what the keys are
      for (int64_t i = 0; i < q.size(); ++i) q.put(i, rounded(q[i], mp::BF16));
    for (int64_t r = 0; r < n_regions; ++r) {
      Random same = c.shared ? Random(uint64_t(r / c.n_kv_heads + 99)) : random;
      pages.fill(r, c.lens[size_t(r)], c.shared ? same : random);
      caps.push_back(std::max(1, c.lens[size_t(r)] + (c.full ? 0 : 5)));
    }
    for (int64_t s = 0; s < n_seq; ++s) q_pos[size_t(s)] = s == 2 ? -1 : 2 * c.lens[size_t(s * c.n_kv_heads)] + 40;
  }
  mp::DecodeArgs args() {
    mp::DecodeArgs a{};
    a.pool = pages.args(), a.q = q.data(), a.k_new = k.data(), a.v_new = v.data();
    a.q_dtype = a.k_dtype = a.v_dtype = q.dtype;
    a.q_seq = n_heads * c.key_dim, a.q_head = a.k_head = c.key_dim, a.k_seq = c.n_kv_heads * c.key_dim;
    a.v_seq = c.n_kv_heads * c.value_dim, a.v_head = c.value_dim;
    a.table = pages.table.data(), a.table_row = pages.per_region, a.lens = lens.data(), a.caps = caps.data();
    a.recent = recent.data(), a.q_pos = q_pos.data(), a.sink_logits = c.sink_logits ? sink_logits.data() : nullptr;
    a.out = out.data(), a.lse = lse.data(), a.evicted = evicted.data();
    a.n_seq = n_seq, a.n_heads = n_heads, a.n_kv_heads = c.n_kv_heads, a.window = c.window, a.signal = c.signal;
    a.reduce = c.reduce, a.evict = c.evict, a.sinks = c.sinks, a.shared = c.shared, a.seed = 11;
    a.unit_width = 2, a.unit_shift = 1, a.stride = 0, a.n_threads = 2;
    a.scale = 1 / std::sqrt(double(c.key_dim)), a.softcap = c.softcap, a.decay = c.decay;
    return a;
  }
};

// An entry that a query meets; the last one of a region is the new one.
struct Seen {
  vector<double> key, value;
  int32_t position;
  double score, log_mass;
};

inline vector<Seen> stored_entries(const DecodeStep& s, int64_t r) {
  vector<Seen> entries;
  for (int64_t i = 0; i < s.c.lens[size_t(r)]; ++i) {
    Seen e{{}, {}, s.pages.position(r, i), double(s.pages.score(r, i)), s.c.masses ? double(s.pages.log_mass(r, i)) : 0};
    for (int64_t d = 0; d < s.c.key_dim; ++d) e.key.push_back(s.pages.key(r, i, d));
    for (int64_t d = 0; d < s.c.value_dim; ++d) e.value.push_back(s.pages.value(r, i, d));
    entries.push_back(e);
  }
  return entries;
}

inline Seen new_entry(const DecodeStep& s, int64_t r) {
  Seen e{{}, {}, s.q_pos[size_t(r / s.c.n_kv_heads)], 0, 0};
  for (int64_t d = 0; d < s.c.key_dim; ++d) e.key.push_back(rounded(s.k[r * s.c.key_dim + d], s.pages.dtype));
  for (int64_t d = 0; d < s.c.value_dim; ++d) e.value.push_back(rounded(s.v[r * s.c.value_dim + d], s.pages.dtype));
  return e;
}

// Attention of the queries of region r: compares out and lse; returns per entry what the group gives it.
inline vector<double> attention(Report& report, const DecodeStep& s, int64_t r, const vector<Seen>& entries) {
  const DecodeCase& c = s.c;
  const int64_t seq = r / c.n_kv_heads, head = r % c.n_kv_heads;
  vector<vector<double>> given(entries.size());
  for (int64_t h = 0; h < c.group; ++h) {
    const int64_t row = seq * s.n_heads + head * c.group + h;
    vector<double> p;
    for (const Seen& e : entries) {
      double dot = 0;
      for (int64_t d = 0; d < c.key_dim; ++d) dot += s.q[row * c.key_dim + d] * e.key[size_t(d)];
      const bool visible = e.position >= 0 && (c.window == 0 || s.q_pos[size_t(seq)] - e.position < c.window);
      p.push_back(visible ? soft_cap(dot / std::sqrt(double(c.key_dim)), c.softcap) + e.log_mass : -INF);
    }
    const double lse = softmax(p, c.sink_logits ? &s.sink_logits[size_t(head * c.group + h)] : nullptr);
    report.near("a log-sum-exp", double(s.lse[size_t(row)]), lse);
    for (int64_t d = 0; d < c.value_dim; ++d) {
      double sum = 0;
      for (size_t i = 0; i < entries.size(); ++i) sum += p[i] * entries[i].value[size_t(d)];
      report.near("an output", s.out[row * c.value_dim + d], sum);
    }
    for (size_t i = 0; i < entries.size(); ++i) given[i].push_back(p[i]);
  }
  vector<double> received;
  for (const vector<double>& p : given) received.push_back(reduced(p, c.reduce));
  return received;
}

inline double hash24(uint32_t seed, uint32_t head, uint32_t position) {
  uint32_t h = position * 0x9E3779B1u + (head * 0x85EBCA77u + seed * 0xC2B2AE3Du);
  h = (h ^ h >> 16) * 0x7FEB352Du, h = (h ^ h >> 15) * 0x846CA68Bu;
  return double((h ^ h >> 16) >> 8);
}

// The value by which an entry leaves, lowest first.
inline double leaving_value(const DecodeStep& s, int64_t r, const Seen& e) {
  const DecodeCase& c = s.c;
  const int32_t age = s.q_pos[size_t(r / c.n_kv_heads)] - e.position;
  const int32_t unit = e.position / 2 + 1;  // of SPACED: width 2, shift 1
  switch (c.evict) {
    case mp::ACC_MEAN: return e.score / std::max(age + 1, 1);
    case mp::OLDEST: return e.position;
    case mp::RANDOM: return hash24(11, c.shared ? 0 : uint32_t(r % c.n_kv_heads), uint32_t(e.position));
    case mp::HEAVIEST: return -e.score;
    case mp::SPACED: return unit & -unit;
    default: return e.score;
  }
}

inline double guarded(const DecodeStep& s, int64_t r, const Seen& e, double value) {
  const int32_t age = s.q_pos[size_t(r / s.c.n_kv_heads)] - e.position;
  if (e.position < s.c.sinks || age < s.recent[size_t(r)]) value = INF;
  return s.c.window > 0 && age >= s.c.window - 1 ? -INF : value;
}

inline void one_decode(const Kernels& kernels, Report& report, const DecodeCase& c, int64_t dtype, int64_t q_dtype,
                       Random& random) {
  DecodeStep s(c, dtype, q_dtype, random);
  vector<vector<Seen>> all;
  for (int64_t r = 0; r < s.n_regions; ++r) all.push_back(stored_entries(s, r)), all.back().push_back(new_entry(s, r));
  const mp::DecodeArgs args = s.args();
  report.same("the result of decode", kernels("mp_decode", args), 0);
  for (int64_t r = 0; r < s.n_regions; ++r) {
    if (s.q_pos[size_t(r / c.n_kv_heads)] < 0) {
      report.same("who leaves a sequence that takes no part", s.evicted[size_t(r)], -1);
      report.same("the length of a sequence that takes no part", s.lens[size_t(r)], c.lens[size_t(r)]);
      continue;
    }
    vector<Seen>& entries = all[size_t(r)];
    const vector<double> received = attention(report, s, r, entries);
    for (size_t i = 0; i < entries.size(); ++i) {
      if (c.signal == mp::SUM) entries[i].score = c.decay * entries[i].score + received[i];
      if (c.signal == mp::LAST) entries[i].score = received[i];
    }
  }
  const bool by_score = c.evict == mp::ACC || c.evict == mp::ACC_MEAN || c.evict == mp::HEAVIEST;
  for (int64_t r = 0; r < s.n_regions; ++r) {
    if (s.q_pos[size_t(r / c.n_kv_heads)] < 0) continue;
    const vector<Seen>& entries = all[size_t(r)];
    const int64_t n = c.lens[size_t(r)], first = r / c.n_kv_heads * c.n_kv_heads;
    const bool grows = c.evict == mp::NEVER || n < s.caps[size_t(r)];
    report.same("a length", s.lens[size_t(r)], n + grows);
    double lowest = INF, left = INF;
    for (size_t i = 0; i < entries.size(); ++i) {
      double value = 0;
      const int64_t heads = c.shared && by_score ? c.n_kv_heads : 1, from = heads > 1 ? first : r;
      for (int64_t h = 0; h < heads; ++h) value += leaving_value(s, r, all[size_t(from + h)][i]) / double(heads);
      value = guarded(s, r, entries[i], value);
      lowest = std::min(lowest, value);
      if (entries[i].position == s.evicted[size_t(r)]) left = value;
    }
    if (grows) report.same("who leaves where there is room", s.evicted[size_t(r)], -1);
    if (!grows) report.near("the value of the entry that left", left, lowest);
    for (int64_t i = 0; i < s.lens[size_t(r)]; ++i) {  // each slot: what it held, or the new entry
      const bool takes = grows ? i == n : entries[size_t(i)].position == s.evicted[size_t(r)];
      const Seen& e = takes ? entries.back() : entries[size_t(i)];
      report.same("a stored position", s.pages.position(r, i), e.position);
      report.near("a score", double(s.pages.score(r, i)), e.score);
      for (int64_t d = 0; d < c.key_dim; d += 7) report.near("a stored key", s.pages.key(r, i, d), e.key[size_t(d)]);
      for (int64_t d = 0; d < c.value_dim; d += 7)
        report.near("a stored value", s.pages.value(r, i, d), e.value[size_t(d)]);
    }
  }
}

inline void decode(const Kernels& kernels, Report& report) {
  using namespace mp;
  const DecodeCase cases[] = {
      {1, 64, 64, 16, NO_SIGNAL, MEAN, NEVER, {40, 0, 7, 150}, 1, 0, 0, 0, 1, false, false, false, false},
      {4, 64, 80, 64, SUM, MEAN, ACC, {1500, 3, 600, 513}, 2, 0, 4, 0, 1, true, false, true, false},
      {3, 20, 24, 8, SUM, MAX, ACC_MEAN, {41, 90, 33, 64}, 2, 60, 2, 0, 0.9, false, true, true, false},
      {2, 33, 7, 8, LAST, ADD, HEAVIEST, {41, 90}, 1, 0, 2, 30, 1, true, true, true, false},
      {5, 128, 128, 32, SUM, MEAN, ACC_MEAN, {70, 70, 70, 70}, 2, 0, 4, 0, 1, false, false, true, true},
      {7, 16, 16, 16, NO_SIGNAL, MEAN, OLDEST, {55, 30}, 2, 40, 4, 0, 1, false, false, true, false},
      {8, 16, 16, 16, NO_SIGNAL, MEAN, RANDOM, {55, 30}, 2, 0, 4, 0, 1, false, false, true, false},
      {6, 96, 32, 16, NO_SIGNAL, MEAN, SPACED, {55, 31}, 2, 0, 4, 2, 1, false, true, true, false},
      {4, 8, 8, 8, LAST, MEAN, ACC, {20, 12}, 1, 0, 0, 0, 1, false, false, false, false},
  };
  for (const int64_t dtype : DTYPES) {
    Random random{uint64_t(dtype + 1)};
    report.begin(with_type("decode", dtype), tolerance_of(dtype));
    for (const DecodeCase& c : cases) one_decode(kernels, report, c, dtype, dtype, random);
    one_decode(kernels, report, cases[1], dtype, F32, random);
    report.end();
  }
}

}  // namespace check
