// Pages of codes: what is written stands for the numbers it was made of, and what is read is what stands there.
#pragma once

#include "decode.hpp"
#include "quantized/packed_args.hpp"

namespace check {

struct Coding {
  int64_t format, group;  // group: 0 for all channels of a slot
  bool by_channel, symmetric, fixed;
  int64_t n_extra;
  bool less_mean = false;
};

inline int64_t bits_of(int64_t format) { return format == mp::FP8 ? 8 : format >= mp::NUQ2 ? format - 16 : format; }
inline int64_t low_bits(int64_t format) { return bits_of(format) == 3 ? 2 : bits_of(format); }

// One side of packed pages: where things lie, as kernels/packed/layout.py says, and what codes stand for.
struct PackedSide {
  Coding coding;
  int64_t slots, dim;
  bool is_key;
  mp::SideArgs a{};
  int64_t end = 0;
  vector<float> table, cuts, scales, zeros;  // (Hkv, dim) of the last two

  PackedSide(Coding c, int64_t page_slots, int64_t channels, bool keys, int64_t begin, int64_t n_kv_heads, Random& random)
      : coding(c), slots(page_slots), dim(channels), is_key(keys) {
    const bool rows = c.format == mp::ROWS, e4m3 = c.format == mp::FP8;
    int64_t at = begin;
    a.format = c.format, a.codes = at, a.top = a.scales = a.zeros = a.means = a.extra = -1;
    a.by_channel = c.by_channel || c.fixed || e4m3;
    a.group = c.fixed || e4m3 ? slots : c.group > 0 ? c.group : dim;
    if (rows) {
      end = at + 2 * slots * dim;
      return;
    }
    at += slots * dim * low_bits(c.format) / 8;
    const int64_t tiles = (keys ? slots : dim) / 16, depth = keys ? dim : slots;
    if (bits_of(c.format) == 3) a.top = at, at += tiles * ((depth + 31) / 32) * 64;
    if (e4m3) {
      a.scales = at, at += 4;
    } else if (!c.fixed) {
      const int64_t n = c.by_channel ? slots / c.group * dim : slots * (dim / a.group);
      a.scales = at, at += 2 * n;
      if (!c.symmetric) a.zeros = at, at += 2 * n;
    }
    if (c.less_mean) a.means = at, at += 2 * dim;
    a.n_extra = c.n_extra;
    if (c.n_extra > 0) a.extra = at, at += 4 * c.n_extra;
    a.factor_bytes = a.scales >= 0 ? at - a.scales : 0, end = at;
    const int64_t last = (int64_t(1) << bits_of(c.format)) - 1;
    for (int64_t i = 0; c.format >= mp::NUQ2 && i <= last; ++i)  // uneven, and exact in bf16
      table.push_back(float(rounded(std::sin(M_PI * (double(i) / double(last) - 0.5)), mp::BF16)));
    for (size_t i = 1; i < table.size(); ++i) cuts.push_back((table[i] + table[i - 1]) / 2);
    const double spread = table.empty() ? 24.0 / double(last) : 12.0;  // calibrated for numbers up to 10 on either side
    for (int64_t i = 0; c.fixed && i < n_kv_heads * dim; ++i) {
      scales.push_back(float(spread * (1 + random.uniform() / 9)));
      zeros.push_back(float((table.empty() ? -12 : 0) - random.uniform()));
    }
    a.table = table.data(), a.cuts = cuts.data();
    a.fixed_scales = c.fixed ? scales.data() : nullptr, a.fixed_zeros = c.fixed ? zeros.data() : nullptr;
  }

  int64_t code(const char* page, int64_t slot, int64_t channel) const {
    const int64_t lane = (is_key ? slot : channel) % 16, tile = (is_key ? slot : channel) / 16;
    const int64_t depth = is_key ? channel : slot, whole = is_key ? dim : slots, low = low_bits(coding.format);
    const auto bits = [&](int64_t from, int64_t width, int64_t words) {
      const int64_t per = 32 / width, e = depth % per;
      uint32_t word;
      std::memcpy(&word, page + from + 4 * ((tile * words + depth / per) * 16 + lane), 4);
      return int64_t(word >> (width * (e / 2) + 16 * (e % 2)) & ((1u << width) - 1));
    };
    const int64_t lower = bits(a.codes, low, whole * low / 32);
    return a.top >= 0 ? lower | bits(a.top, 1, (whole + 31) / 32) << 2 : lower;
  }
  double scale(const char* page, int64_t head, int64_t slot, int64_t channel) const {
    if (coding.fixed) return double(scales[size_t(head * dim + channel)]);
    return coding.format == mp::FP8 ? get(page + a.scales, mp::F32, 0) : get(page + a.scales, mp::F16, factor(slot, channel));
  }
  double zero(const char* page, int64_t head, int64_t slot, int64_t channel) const {
    if (coding.fixed) return double(zeros[size_t(head * dim + channel)]);
    return a.zeros >= 0 ? get(page + a.zeros, mp::F16, factor(slot, channel)) : 0;
  }
  double mean(const char* page, int64_t channel) const { return a.means >= 0 ? get(page + a.means, mp::F16, channel) : 0; }
  int64_t factor(int64_t slot, int64_t channel) const {
    return a.by_channel ? slot / a.group * dim + channel : channel / a.group * slots + slot;
  }
  // What is stored of a number.
  double number(const char* page, int64_t head, int64_t slot, int64_t channel) const {
    if (coding.format == mp::ROWS) return get(page + a.codes, mp::BF16, slot * dim + channel);
    const int64_t c = code(page, slot, channel);
    double x = double(c);
    if (coding.format == mp::FP8) {
      const int64_t exponent = c >> 3 & 15, mantissa = c & 7;
      x = std::ldexp(double(exponent > 0 ? 8 + mantissa : mantissa), int(std::max<int64_t>(exponent, 1)) - 10);
      x = c >= 128 ? -x : x;
    } else if (!table.empty()) {
      x = double(table[size_t(c)]);
    } else if (coding.symmetric) {
      x -= double(int64_t(1) << (bits_of(coding.format) - 1));
    }
    x = x * scale(page, head, slot, channel) + zero(page, head, slot, channel) + mean(page, channel);
    for (int64_t i = 0; i < a.n_extra; ++i) {
      uint16_t where;
      std::memcpy(&where, page + a.extra + 2 * i, 2);
      if (where == slot * 256 + channel) x += get(page + a.extra + 2 * a.n_extra, mp::F16, i);
    }
    return x;
  }
  // How far that may be from x.
  double bound(const char* page, int64_t head, int64_t slot, int64_t channel, double x) const {
    if (coding.format == mp::ROWS) return std::fabs(x) / 256;
    const double unit = scale(page, head, slot, channel), last = double((int64_t(1) << bits_of(coding.format)) - 1);
    if (coding.format == mp::FP8) return std::fabs(x) / 16 + unit / 1024;
    double step = 1;
    for (size_t i = 1; i < table.size(); ++i) step = std::max(i > 1 ? step : 0, double(table[i] - table[i - 1]));
    return unit * (0.501 * step + last / 2048) + std::fabs(zero(page, head, slot, channel)) / 2048 + 1e-6;
  }
};

struct PackedCase {
  Coding key, value;
  bool rope, balance, evicts;
};

inline void one_packed(const Kernels& kernels, Report& report, const PackedCase& p, int64_t dtype, Random& random) {
  const int64_t slots = 64, dim = 64, value_dim = 32, n = 128, n_regions = 2, n_kv_heads = 2;
  const DecodeCase c{3, dim, value_dim, 16, mp::SUM, mp::MEAN, p.evicts ? mp::ACC : mp::NEVER, {9, 20}, n_kv_heads, 0, 2,
                     0, 1, false, true, p.evicts, false};
  DecodeStep s(c, dtype, mp::F32, random);
  for (int64_t i = 0; i < s.q.size(); ++i) s.q.put(i, rounded(s.q[i], mp::BF16));
  s.q_pos[0] = 3 * int32_t(n);
  const PackedSide key(p.key, slots, dim, true, 0, n_kv_heads, random);
  const PackedSide value(p.value, slots, value_dim, false, key.end, n_kv_heads, random);
  const int64_t page_bytes = (value.end + 63) / 64 * 64;
  const Pages pages(n_regions, n, slots, dim, value_dim, mp::BF16, true, random, page_bytes);
  const auto page = [&](int64_t r, int64_t slot) {
    int64_t row;
    return static_cast<char*>(pages.place(0, r, slot, row)) + row / slots * page_bytes;
  };

  vector<int32_t> lens(n_regions, int32_t(n)), dead(n_regions, 0), pairs, positions, index, start(n_regions, 0);
  vector<float> cos, sin, near_cos(32 * dim / 2), near_sin(near_cos), balance(size_t(n_regions * dim), 1);
  for (int32_t i = 0; i < dim / 2; ++i) pairs.push_back(i), pairs.push_back(i + int32_t(dim) / 2);
  for (int64_t t = 0; t < 3 * n; ++t)
    for (int64_t i = 0; i < dim / 2; ++i) {
      const double angle = double(t) * std::pow(1e-4, double(i) / double(dim / 2));
      cos.push_back(float(std::cos(angle))), sin.push_back(float(std::sin(angle)));
      if (t < 32) near_cos[size_t(i * 32 + t)] = cos.back(), near_sin[size_t(i * 32 + t)] = sin.back();
    }
  for (float& b : balance) b = p.balance ? float(0.5 + random.uniform()) : 1;
  for (int64_t r = 0; r < n_regions; ++r)  // neighbours in the first half, gaps in the second
    for (int64_t i = 0; i < n; ++i) positions.push_back(int32_t(100 + (i < n / 2 ? i : 2 * i))), index.push_back(int32_t(n - 1 - i));
  mp::PackedArgs packed{};
  packed.pool = pages.args(), packed.page_bytes = page_bytes, packed.key = key.a, packed.value = value.a;
  packed.table = pages.table.data(), packed.table_row = pages.per_region, packed.lens = lens.data(), packed.dead = dead.data();
  packed.balance = p.balance ? balance.data() : nullptr;
  if (p.rope) packed.rope = {dim / 2, 3 * n, pairs.data(), cos.data(), sin.data(), near_cos.data(), near_sin.data()};

  Numbers keys = normals(dtype, n_regions * n * dim, random), values = normals(dtype, n_regions * n * value_dim, random);
  for (int64_t i = 0; i < 9; ++i) keys.put(random.below(keys.size()), 9), values.put(random.below(values.size()), -9);
  const vector<float> scores = floats(n_regions * n, random), masses = floats(n_regions * n, random);
  mp::PackedWriteArgs w{};
  w.packed = packed, w.start = start.data(), w.count = lens.data(), w.index = index.data(), w.index_row = w.width = n;
  w.n_regions = n_regions, w.n_kv_heads = n_kv_heads, w.keys = keys.data(), w.values = values.data();
  w.positions = positions.data(), w.scores = scores.data(), w.log_masses = masses.data(), w.k_dtype = w.v_dtype = dtype;
  w.k_region = n * dim, w.k_row = dim, w.v_region = n * value_dim, w.v_row = value_dim;
  w.p_region = w.s_region = w.m_region = n, w.p_row = w.s_row = w.m_row = 1, w.n_threads = 2;
  report.same("the result of write_packed", kernels("mp_write_packed", w), 0);

  const int64_t width = n + 3;  // behind the last slot nothing is written
  vector<float> read_keys(size_t(n_regions * width * dim), 7), read_values(size_t(n_regions * width * value_dim), 7);
  vector<float> read_scores(size_t(n_regions * width), 7), read_masses(read_scores);
  vector<int32_t> read_positions(size_t(n_regions * width), 7);
  const mp::PackedReadArgs reading{packed, read_keys.data(), read_values.data(), read_positions.data(), read_scores.data(),
                                   read_masses.data(), n_regions, n_kv_heads, width, dim, value_dim, 2};
  report.same("the result of read_packed", kernels("mp_read_packed", reading), 0);

  // A key as it is read: turned to its position, with its balance.
  const auto read = [&](int64_t r, int64_t slot, const auto& stored) {
    vector<double> k;
    for (int64_t d = 0; d < dim; ++d) k.push_back(stored(d) * double(balance[size_t(r * dim + d)]));
    const int64_t t = positions[size_t(r * n + index[size_t(slot)])];
    for (int64_t i = 0; p.rope && i < dim / 2; ++i) {
      const double co = double(cos[size_t(t * dim / 2 + i)]), si = double(sin[size_t(t * dim / 2 + i)]), x = k[size_t(i)], y = k[size_t(i + dim / 2)];
      k[size_t(i)] = x * co - y * si, k[size_t(i + dim / 2)] = y * co + x * si;
    }
    return k;
  };
  vector<vector<Seen>> all;
  for (int64_t r = 0; r < n_regions; ++r) {
    all.push_back(stored_entries(s, r));
    for (int64_t slot = 0; slot < n; ++slot) {
      const int64_t row = r * n + index[size_t(slot)], in_page = slot % slots;
      const char* from = page(r, slot);
      const vector<double> found = read(r, slot, [&](int64_t d) { return key.number(from, r, in_page, d); });
      double error = 0, bound = 1e-5;  // of all channels: RoPE mixes them
      for (int64_t d = 0; d < dim; ++d) {
        error += std::pow(found[size_t(d)] - keys[row * dim + d], 2);
        const double largest = std::fabs(keys[row * dim + d]) + std::fabs(keys[row * dim + (d + dim / 2) % dim]);
        bound += std::pow(key.bound(from, r, in_page, d, p.rope ? largest : keys[row * dim + d] / double(balance[size_t(r * dim + d)])) *
                              double(balance[size_t(r * dim + d)]), 2);
      }
      report.within("a stored key", std::sqrt(error), std::sqrt(bound));
      Seen e{found, {}, pages.position(r, slot), double(pages.score(r, slot)), double(pages.log_mass(r, slot))};
      for (int64_t d = 0; d < value_dim; ++d) {
        e.value.push_back(value.number(from, r, in_page, d));
        const double was = values[row * value_dim + d];
        report.within("a stored value", e.value.back() - was, value.bound(from, r, in_page, d, was));
      }
      report.same("a position", e.position, positions[size_t(row)]);
      report.near("a score", e.score, double(scores[size_t(row)]));
      report.near("a log mass", e.log_mass, double(masses[size_t(row)]));
      const size_t at = size_t(r * width + slot);
      for (int64_t d = 0; d < dim; ++d) report.near("a key that is read", double(read_keys[at * size_t(dim) + size_t(d)]), found[size_t(d)]);
      for (int64_t d = 0; d < value_dim; ++d)
        report.near("a value that is read", double(read_values[at * size_t(value_dim) + size_t(d)]), e.value[size_t(d)]);
      report.same("a position that is read", read_positions[at], e.position);
      report.near("a score that is read", double(read_scores[at]), e.score);
      report.near("a log mass that is read", double(read_masses[at]), e.log_mass);
      all.back().push_back(e);
    }
    for (int64_t slot = n; slot < width; ++slot)
      report.same("a position behind the last slot", read_positions[size_t(r * width + slot)], 7);
    report.near("a key behind the last slot", double(read_keys[size_t(((r + 1) * width - 1) * dim)]), 7);
    all.back().push_back(new_entry(s, r));
  }
  all[1][size_t(c.lens[1]) + 5].position = pages.position(1, 5) = -1, dead[1] = 1;  // an entry that left before
  s.caps = {int32_t(n) + 9 + (p.evicts ? 0 : 9), int32_t(n) + 19 + (p.evicts ? 0 : 9)};
  const mp::PackedDecodeArgs args{s.args(), packed};
  report.same("the result of decode_packed", kernels("mp_decode_packed", args), 0);
  for (int64_t r = 0; r < n_regions; ++r) {
    vector<Seen>& entries = all[size_t(r)];
    const vector<double> received = attention(report, s, r, entries);
    double lowest = INF, left = INF;
    for (size_t i = 0; i < entries.size(); ++i) {
      Seen& e = entries[i];
      e.score += received[i];
      if (e.position < 0) continue;
      const double worth = guarded(s, r, e, e.score);
      lowest = std::min(lowest, worth);
      if (e.position == s.evicted[size_t(r)]) left = std::min(left, worth);  // both parts may hold a position
    }
    if (p.evicts) report.near("the value of the entry that left", left, lowest);
    if (!p.evicts) report.same("who leaves where there is room", s.evicted[size_t(r)], -1);
    for (int64_t slot = 0; slot < n; ++slot) {
      const Seen& e = entries[size_t(c.lens[size_t(r)] + slot)];
      if (pages.position(r, slot) >= 0) report.near("a score", double(pages.score(r, slot)), e.score);
      if (pages.position(r, slot) != e.position) report.same("who is buried", e.position, s.evicted[size_t(r)]);
    }
  }
}

inline void packed(const Kernels& kernels, Report& report) {
  using namespace mp;
  const PackedCase cases[] = {
      // keys before RoPE have calibrated scales
      {{INT2, 32, true, false, false, 0}, {INT2, 32, false, false, false, 0}, false, false, false},
      {{INT3, 64, true, false, false, 0}, {INT3, 0, false, false, false, 0}, false, false, true},
      {{INT4, 32, false, false, false, 0}, {INT4, 16, false, true, false, 0}, false, false, false},
      {{INT8, 0, false, true, false, 0}, {INT8, 0, false, false, false, 0}, false, false, true},
      {{FP8, 0, false, false, false, 0}, {FP8, 0, false, false, false, 0}, false, false, false},
      {{ROWS, 0, false, false, false, 0}, {INT4, 32, false, false, false, 0}, false, false, false},
      {{INT4, 32, true, false, false, 0}, {ROWS, 0, false, false, false, 0}, false, true, false},
      {{NUQ4, 64, true, false, false, 13}, {NUQ3, 0, false, false, false, 5}, false, false, false},
      {{NUQ4, 0, false, false, true, 7}, {INT2, 0, false, true, false, 9}, true, false, true},
      {{INT4, 0, false, false, false, 0, true}, {INT4, 0, false, false, false, 0}, false, true, true},
      {{NUQ3, 32, false, false, false, 3, true}, {INT2, 0, false, false, false, 0}, false, false, false},
      {{INT4, 0, false, false, true, 0}, {NUQ2, 32, false, false, false, 0}, false, false, false},
  };
  for (const int64_t dtype : DTYPES) {
    Random random{uint64_t(dtype + 51)};
    report.begin(with_type("packed pages", dtype), kernels.pairs ? 2e-2 : 2e-5);
    for (const PackedCase& c : cases) one_packed(kernels, report, c, dtype, random);
    report.end();
  }
}

}  // namespace check
