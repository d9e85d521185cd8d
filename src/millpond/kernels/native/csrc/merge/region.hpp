// One region of a page pool after a step: which of its entries leave, and what is known of those that stay.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/maths.hpp"
#include "common/pages.hpp"
#include "common/workspace.hpp"

namespace mp {

// An entry that leaves. `into`: the slot that takes it in, -1 for none; `alike`: how much it is like that one.
struct Leaver {
  int32_t slot, position, into;
  float value, alike;
};

inline uint32_t hash24(uint32_t seed, uint32_t head, uint32_t position) {
  uint32_t h = position * 0x9E3779B1u + (head * 0x85EBCA77u + seed * 0xC2B2AE3Du);
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  return (h ^ (h >> 16)) >> 8;
}

// What a thread holds of a region, by slot: (n,) each.
struct Columns {
  float *acc, *value;
  int32_t* position;
  uint8_t* gone;

  static int64_t bytes(int64_t n) { return round_up(13 * n, 64); }
  Columns(char* memory, int64_t n)
      : acc(reinterpret_cast<float*>(memory)), value(acc + n), position(reinterpret_cast<int32_t*>(value + n)),
        gone(reinterpret_cast<uint8_t*>(position + n)) {}
};

struct Region {
  const MergeArgs& a;
  const Pool& pool;
  const int r, seq, n, leaving;  // n entries are held
  const int32_t* pages;
  const int32_t q_pos;

  Region(const MergeArgs& args, const Pool& p, int region)
      : a(args), pool(p), r(region), seq(region / int(args.n_kv_heads)), n(args.lens[region]), leaving(spare(args, region)),
        pages(args.table + region * args.table_row), q_pos(args.q_pos[seq]) {}

  static int spare(const MergeArgs& a, int r) {
    return a.q_pos[r / int(a.n_kv_heads)] < 0 ? 0 : std::max(0, a.lens[r] - a.caps[r]);
  }
  uint32_t head() const { return uint32_t(r % int(a.n_kv_heads)); }
  double mass(int slot) const { return a.uses_masses ? std::exp(double(*pool.log_mass(pages, slot))) : 1.0; }

  void load(const Columns& c) const {
    for (int i = 0; i < n;) {
      const int run = pool.run(i, n, n);
      std::memcpy(c.acc + i, pool.score(pages, i), size_t(run) * 4);
      std::memcpy(c.position + i, pool.position(pages, i), size_t(run) * 4);
      i += run;
    }
    std::fill(c.gone, c.gone + n, uint8_t(0));
    value(c);
  }
  float per_query(float acc, int32_t position) const { return acc / float(std::max(1, q_pos - position + 1)); }

  // The value by which entries leave.
  void value(const Columns& c) const {
    if (a.local != nullptr) return blend(c, a.local + r * a.local_row);
    for (int i = 0; i < n; ++i) switch (a.evict) {
        case ACC_MEAN: c.value[i] = per_query(c.acc[i], c.position[i]); break;
        case OLDEST: c.value[i] = float(c.position[i]); break;
        case RANDOM: c.value[i] = float(hash24(uint32_t(a.seed), head(), uint32_t(c.position[i]))); break;
        default: c.value[i] = c.acc[i];
      }
  }
  void blend(const Columns& c, const float* local) const {
    double overall = 0, latest = 0;
    for (int i = 0; i < n; ++i) overall += double(c.acc[i]), latest += double(local[i]);
    const double factor = overall / latest;
    for (int i = 0; i < n; ++i) c.value[i] = std::max(c.acc[i], float(double(local[i]) * factor));
  }

  // The `leaving` entries of lowest value, protected ones last, ties to the oldest: lowest first.
  void choose(const Columns& c, Leaver* out) const {
    const auto before = [](const Leaver& x, const Leaver& y) {
      return x.value < y.value || (x.value == y.value && x.position < y.position);
    };
    int held = 0;  // a heap whose top is the one to be replaced first
    for (int i = 0; i < n; ++i) {
      const int32_t p = c.position[i];
      const bool pinned = p < a.sinks || q_pos - p < a.recent[r];
      const float v = pinned || c.value[i] != c.value[i] ? __builtin_inff() : c.value[i];
      const Leaver candidate{i, p, -1, v, -__builtin_inff()};
      if (held < leaving) {
        out[held++] = candidate;
        std::push_heap(out, out + held, before);
      } else if (before(candidate, out[0])) {
        std::pop_heap(out, out + held, before);
        out[held - 1] = candidate;
        std::push_heap(out, out + held, before);
      }
    }
    std::sort_heap(out, out + held, before);
    for (int i = 0; i < held; ++i) {
      out[i].value = c.value[out[i].slot];
      c.gone[out[i].slot] = 1;
    }
  }

  // Move the last entries that stay into the slots that were left.
  void close(const Columns& c) const {
    const int after = n - leaving;
    int source = n;
    for (int to = 0; to < after; ++to) {
      if (!c.gone[to]) continue;
      do --source;
      while (c.gone[source]);
      std::memcpy(pool.key(pages, to), pool.key(pages, source), size_t(pool.key_dim * pool.item));
      std::memcpy(pool.value(pages, to), pool.value(pages, source), size_t(pool.value_dim * pool.item));
      *pool.position(pages, to) = *pool.position(pages, source);
      *pool.score(pages, to) = *pool.score(pages, source);
      if (pool.masses) *pool.log_mass(pages, to) = *pool.log_mass(pages, source);
    }
    a.lens[r] = after;
  }
};

}  // namespace mp
