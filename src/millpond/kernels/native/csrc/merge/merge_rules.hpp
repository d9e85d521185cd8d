// What the entries that stay take in: by likeness, or by position.
#pragma once

#include "merge/region.hpp"

namespace mp {

constexpr float NO_LENGTH = 1e-12f;              // rows are at least this long
constexpr double TINY_WEIGHT = 1.17549435e-38;  // the smallest float: no weight is below

// Rows as floats, padded with zeros: one of each kind for what is read, and one for what is made.
struct Rows {
  float *key, *value, *mixed;
  int key_pad, value_pad;

  static int64_t bytes(const Pool& pool) {
    return 4 * (2 * (round_up(pool.key_dim, W) + round_up(pool.value_dim, W)) + W);
  }
  Rows(const Pool& pool, char* memory)
      : key(reinterpret_cast<float*>(memory)), key_pad(int(round_up(pool.key_dim, W))),
        value_pad(int(round_up(pool.value_dim, W))) {
    value = key + key_pad;
    mixed = value + value_pad;
    std::memset(memory, 0, size_t(bytes(pool)));
  }
};

inline float length(const float* row, int pad) {
  vf squares{};
  for (int d = 0; d < pad; d += W) squares += load(row + d) * load(row + d);
  return std::sqrt(sum(squares));
}

// Cosine of `row` (padded) with one stored row.
template <class T>
float cosine(const float* row, float inverse, const T* stored, int dim) {
  vf dot{}, squares{};
  int d = 0;
  for (; d + W <= dim; d += W) {
    const vf x = load(stored + d);
    dot += x * load(row + d), squares += x * x;
  }
  if (d < dim) {
    const vf x = load_part(stored + d, dim - d);
    dot += x * load(row + d), squares += x * x;
  }
  return sum(dot) * inverse / std::max(std::sqrt(sum(squares)), NO_LENGTH);
}

// The slot that stays, is open, and is most like the entry in `leaver`; ties to the oldest.
template <class T>
void find_alike(const Region& g, const Columns& c, const Rows& rows, Leaver& leaver) {
  const Pool& pool = g.pool;
  const bool both = g.a.weigh == BY_SCORE;
  widen(rows.key, pool.key(g.pages, leaver.slot), pool.dtype, int(pool.key_dim));
  const float key_inverse = 1.0f / std::max(length(rows.key, rows.key_pad), NO_LENGTH);
  float value_inverse = 0.0f;
  if (both) {
    widen(rows.value, pool.value(g.pages, leaver.slot), pool.dtype, int(pool.value_dim));
    value_inverse = 1.0f / std::max(length(rows.value, rows.value_pad), NO_LENGTH);
  }
  int32_t oldest = INT32_MAX;
  for (int i = 0; i < g.n;) {
    const int run = pool.run(i, g.n, g.n);
    const T* key = reinterpret_cast<const T*>(pool.key(g.pages, i));
    const T* value = reinterpret_cast<const T*>(pool.value(g.pages, i));
    for (int j = i; j < i + run; ++j, key += pool.key_dim, value += pool.value_dim) {
      if (c.gone[j] || c.position[j] < g.a.closed) continue;
      float u = cosine(rows.key, key_inverse, key, int(pool.key_dim));
      if (both) {
        const float other = u > 0 ? cosine(rows.value, value_inverse, value, int(pool.value_dim)) : 0.0f;
        u = other > 0 ? u * other : -1.0f;
      }
      if (u > leaver.alike || (u == leaver.alike && c.position[j] < oldest))
        leaver.alike = u, leaver.into = j, oldest = c.position[j];
    }
    i += run;
  }
}

// Of the entries that leave (lowest first), those that matter less than the others and are dropped: how many.
inline int dropped(const Region& g, const Columns& c, float* lowest) {
  const double kept = double(g.n - g.leaving);
  double total = 0;
  for (int i = 0; i < g.n; ++i) total += double(c.value[i]);
  std::partial_sort_copy(c.value, c.value + g.n, lowest, lowest + g.leaving);
  int spared = 0;  // lowest entries without which the others still cover enough, and one more
  double low = 0;
  for (int i = 0; i <= g.leaving && total - low >= g.a.cover * total; ++i) {
    ++spared;
    if (i < g.leaving) low += double(lowest[i]);
  }
  const int relevant = std::max(0, 1 + g.leaving - spared);
  return std::max(0, g.leaving - int(std::min(double(relevant), std::floor(g.a.most * kept))));
}

// rows.mixed[0..pad) = row * factor, or + row * factor.
inline void blend_in(float* mixed, const float* row, float factor, int pad, bool first) {
  for (int d = 0; d < pad; d += W) store(mixed + d, first ? load(row + d) * factor : load(mixed + d) + load(row + d) * factor);
}

// The weighted mean of one array's rows (0 keys, 1 values): that of `slot` by `own`, and of the leavers that go there by
// `weight(leaver, row)`. With `per_length` directions and lengths are averaged apart.
template <class F>
void mix_rows(const Region& g, const Rows& rows, int which, int slot, double own, const Leaver* leavers, int n, bool per_length,
              bool counts, const F& weight) {
  const Pool& pool = g.pool;
  const int dim = int(which == 0 ? pool.key_dim : pool.value_dim), pad = which == 0 ? rows.key_pad : rows.value_pad;
  float* row = which == 0 ? rows.key : rows.value;
  const auto read = [&](int at) {
    widen(row, which == 0 ? pool.key(g.pages, at) : pool.value(g.pages, at), pool.dtype, dim);
    return length(row, pad);
  };
  double total = own, lengths = 0;
  const float base = read(slot);
  lengths = own * double(base);
  blend_in(rows.mixed, row, float(per_length ? own / std::max(double(base), double(NO_LENGTH)) : own), pad, true);
  for (int i = 0; i < n; ++i) {
    if (leavers[i].into != slot) continue;
    const float size = read(leavers[i].slot);
    const double w = weight(leavers[i], size, base);
    total += counts ? 1.0 : w;
    lengths += w * double(size);
    blend_in(rows.mixed, row, float(per_length ? w / std::max(double(size), double(NO_LENGTH)) : w), pad, false);
  }
  const float scale = per_length ? float(lengths / total) / std::max(length(rows.mixed, pad), NO_LENGTH) : float(1.0 / total);
  for (int d = 0; d < pad; d += W) store(rows.mixed + d, load(rows.mixed + d) * scale);
  narrow(which == 0 ? pool.key(g.pages, slot) : pool.value(g.pages, slot), pool.dtype, rows.mixed, dim);
}

// Leavers that go to the same slot are taken in together. `into` is used up.
inline void join_alike(const Region& g, const Columns& c, const Rows& rows, Leaver* leavers) {
  const int64_t weigh = g.a.weigh;
  for (int first = 0; first < g.leaving; ++first) {
    const int slot = leavers[first].into;
    if (slot < 0) continue;
    const int n = g.leaving - first;
    const Leaver* here = leavers + first;
    const double mass = g.mass(slot);
    const auto by_score = [](const Leaver& e, float, float) { return std::max(double(e.value), TINY_WEIGHT); };
    const auto by_exp = [&g](const Leaver& e, float, float) { return g.mass(e.slot) * std::exp(double(e.alike)); };
    const auto as_is = [](const Leaver& e, float, float) { return double(e.alike); };
    const auto by_norms = [&g](const Leaver& e, float own, float target) {
      const double both = double(own) + double(target);
      return both > 0 ? g.mass(e.slot) * double(e.alike) * double(own) / both : 0.0;
    };
    const double value = std::max(double(c.value[slot]), TINY_WEIGHT);
    for (int which = weigh == BY_NORMS ? 1 : 0; which < 2; ++which) switch (weigh) {
        case BY_NORMS: mix_rows(g, rows, which, slot, mass, here, n, false, false, by_norms); break;
        case BY_EXP: mix_rows(g, rows, which, slot, mass * M_E, here, n, false, false, by_exp); break;
        case BY_COUNT: mix_rows(g, rows, which, slot, 1.0, here, n, false, true, as_is); break;
        default: mix_rows(g, rows, which, slot, value, here, n, which == 0, false, by_score);
      }
    double masses = mass;
    float* score = g.pool.score(g.pages, slot);
    for (int i = first; i < g.leaving; ++i) {
      if (leavers[i].into != slot) continue;
      masses += g.mass(leavers[i].slot);
      if (weigh == BY_SCORE) *score += c.acc[leavers[i].slot];
      leavers[i].into = -1;
    }
    if (g.a.uses_masses) *g.pool.log_mass(g.pages, slot) = float(std::log(masses));
  }
}

// The entries right behind a leaver in the text, of those that stay or leave after it: slots in `out`, at most `most`,
// how many is returned.
inline int find_next(const Region& g, const Columns& c, int32_t behind, int most, int32_t* out) {
  const auto before = [&c](int32_t x, int32_t y) { return c.position[x] < c.position[y]; };
  int held = 0;
  for (int i = 0; i < g.n && most > 0; ++i) {
    if (c.position[i] <= behind) continue;
    if (held < most) {
      out[held++] = i;
      std::push_heap(out, out + held, before);
    } else if (c.position[i] < c.position[out[0]]) {
      std::pop_heap(out, out + held, before);
      out[held - 1] = i;
      std::push_heap(out, out + held, before);
    }
  }
  return held;
}

inline double attention(const Region& g, const Columns& c, int slot) {
  return double(g.a.average ? g.per_query(c.acc[slot], c.position[slot]) : c.acc[slot]);
}

// What the attention of a leaver is divided by, where that is the same for all.
inline double against_kept(const Region& g, const Columns& c) {
  double total = 0, most = 0;
  int64_t count = 0;
  for (int i = 0; i < g.n && g.a.over != OVER_TARGETS; ++i) {
    if (c.gone[i]) continue;
    most = std::max(most, attention(g, c, i));
    if (c.position[i] >= g.a.closed) total += attention(g, c, i), ++count;
  }
  return g.a.over == OVER_MAX ? most : total / double(std::max<int64_t>(1, count));
}

// What leaves gives its value to the entries behind it, oldest first, so that who leaves later passes it on. `targets`:
// room for n slots. Leavers come to lie in the order of their positions.
inline void join_next(const Region& g, const Columns& c, const Rows& rows, Leaver* leavers, int32_t* targets) {
  const Pool& pool = g.pool;
  const int most = int(g.a.targets > 0 ? std::min<int64_t>(g.a.targets, g.n) : g.n - g.leaving);
  const double shared = against_kept(g, c);
  std::sort(leavers, leavers + g.leaving, [](const Leaver& x, const Leaver& y) { return x.position < y.position; });
  for (int i = 0; i < g.leaving; ++i) {
    const Leaver& e = leavers[i];
    const int n = find_next(g, c, e.position, most, targets);
    double against = shared;
    if (g.a.over == OVER_TARGETS && n > 0) {
      against = 0;
      for (int t = 0; t < n; ++t) against += attention(g, c, targets[t]);
      against /= n;
    }
    const double own = attention(g, c, e.slot);
    double p = against > 0 ? std::min(1.0, std::max(0.0, own / against)) : own > 0 ? 1.0 : 0.0;
    if (g.a.draw) p = double(hash24(uint32_t(g.a.seed), g.head(), uint32_t(e.position))) / 16777216.0 < p ? 1.0 : 0.0;
    if (p == 0 || n == 0) continue;
    const double share = g.a.bias ? p / n * g.mass(e.slot) : p / n;
    widen(rows.value, pool.value(g.pages, e.slot), pool.dtype, int(pool.value_dim));
    for (int t = 0; t < n; ++t) {
      const int slot = targets[t];
      const double mass = g.mass(slot), together = g.a.bias ? mass + share : 1;
      widen(rows.mixed, pool.value(g.pages, slot), pool.dtype, int(pool.value_dim));
      if (g.a.bias) blend_in(rows.mixed, rows.mixed, float(mass / together), rows.value_pad, true);
      blend_in(rows.mixed, rows.value, float(share / together), rows.value_pad, false);
      narrow(pool.value(g.pages, slot), pool.dtype, rows.mixed, int(pool.value_dim));
      if (g.a.bias && g.a.uses_masses) *pool.log_mass(g.pages, slot) = float(std::log(together));
    }
  }
}

}  // namespace mp
