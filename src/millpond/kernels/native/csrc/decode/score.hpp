// The accumulator pass: add this query's probabilities and find, on the way, the entry that leaves.
#pragma once

#include "common/maths.hpp"
#include "decode/region.hpp"

namespace mp {

// Lanes of candidates; see Victim for the order.
struct Candidates {
  vf value = splat(__builtin_inff());
  vi position = splat(INT32_MAX), slot = splat(INT32_MAX);

  MP_INLINE void consider(vf v, vi p, vi s, vi valid) {
    const vi better = valid & ((v < value) | ((v == value) & (p < position)));  // slots only rise: ties keep the first
    value = select(better, v, value);
    position = select(better, p, position);
    slot = select(better, s, slot);
  }
  Victim best() const {
    Victim out;
    for (int i = 0; i < W; ++i)
      if (slot[i] != INT32_MAX) out.consider(value[i], position[i], slot[i]);
    return out;
  }
};

MP_INLINE vf hash_priority(uint32_t seed, uint32_t head, vi position) {
  vu h = (vu)position * 0x9E3779B1u + (head * 0x85EBCA77u + seed * 0xC2B2AE3Du);
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  h = h ^ (h >> 16);
  return to_float((vi)(h >> 8));
}

// What a position is worth in a pattern: 1 or 0 by the stride, or the power of two in the number of its unit.
MP_INLINE vf spaced_value(vi position, int32_t width, int32_t shift, int32_t stride) {
  const vi unit = (width == 1 ? position : position / width) + shift;
  if (stride > 0) return select(unit % stride == 0, splat(1.0f), splat(0.0f));
  return select(unit == 0, splat(2147483648.0f), to_float(unit & -unit));
}

inline bool by_score(int64_t evict) { return evict == ACC || evict == ACC_MEAN || evict == HEAVIEST; }

// Entries of region r in [begin, end), the new one among them.
inline int held_in(const Call& c, int r, int32_t begin, int32_t end) {
  int held = c.position(r) >= begin && c.position(r) < end;
  const Part parts[2] = {c.plain_part(r), c.packed != nullptr ? c.packed_part(r) : Part{}};
  for (int i = 0; i < (c.packed != nullptr ? 2 : 1); ++i) {
    for (int at = 0; at < parts[i].lens;) {
      const int run = parts[i].pool->run(at, parts[i].lens, SPLIT);
      const int32_t* positions = parts[i].pool->position(parts[i].pages, at);
      for (int j = 0; j < run; ++j) held += (positions[j] >= begin) & (positions[j] < end);
      at += run;
    }
  }
  return held;
}

// The value by which entries of region r leave, lowest first.
struct Valuation {
  int64_t evict, window, n_kept, n_whole = 0;
  int32_t q_pos, sinks, recent, unit_width, unit_shift, stride;
  uint32_t seed, head;
  const int32_t* kept;
  int32_t whole[2 * MOST_LEAST];  // n_whole spans that hold no more than must stay

  Valuation(const Call& c, int r)
      : evict(c.a.evict), window(c.a.window), n_kept(c.a.n_kept), q_pos(c.position(r)), sinks(int32_t(c.a.sinks)),
        recent(c.a.recent[r]), unit_width(int32_t(c.a.unit_width)), unit_shift(int32_t(c.a.unit_shift)), stride(int32_t(c.a.stride)),
        seed(uint32_t(c.a.seed)), head(c.a.shared ? 0u : uint32_t(c.head(r))),
        kept(c.a.n_kept > 0 ? c.a.kept + 2 * c.a.n_kept * c.seq(r) : nullptr) {
    const int32_t* least = c.a.least + 3 * c.a.n_least * c.seq(r);
    for (int64_t n = 0; n < (c.full(r) ? c.a.n_least : 0); ++n, least += 3) {
      if (least[2] <= 0 || held_in(c, r, least[0], least[1]) > least[2]) continue;
      whole[2 * n_whole] = least[0];
      whole[2 * n_whole++ + 1] = least[1];
    }
  }

  // What the score and position say, before protection.
  MP_INLINE vf raw(vf score, vi position) const {
    switch (evict) {
      case ACC_MEAN: {
        const vf seen = to_float(q_pos - position + 1);
        return score / select(seen < splat(1.0f), splat(1.0f), seen);
      }
      case OLDEST: return to_float(position);
      case RANDOM: return hash_priority(seed, head, position);
      case HEAVIEST: return -score;
      case SPACED: return spaced_value(position, unit_width, unit_shift, stride);
      default: return score;
    }
  }
  MP_INLINE vf guard(vf value, vi position) const {
    const vi age = q_pos - position;
    value = select((position < sinks) | (age < recent), splat(__builtin_inff()), value);
    for (int64_t n = 0; n < n_kept; ++n)
      value = select((position >= kept[2 * n]) & (position < kept[2 * n + 1]), splat(__builtin_inff()), value);
    for (int64_t n = 0; n < n_whole; ++n)
      value = select((position >= whole[2 * n]) & (position < whole[2 * n + 1]), splat(__builtin_inff()), value);
    if (window > 0) value = select(age >= int32_t(window - 1), splat(-__builtin_inff()), value);
    return value;
  }
};

// Whether the pass may look for the victim itself: with `shared` the heads are averaged first.
inline bool averaged(const Call& c) { return c.a.shared && by_score(c.a.evict); }

// Factors that turn the stored weights of a chunk into probabilities.
inline void chunk_factors(const Call& c, const Slab& slab, int64_t chunk, float* factor) {
  for (int h = 0; h < c.group; ++h) factor[h] = slab.chunk_top[chunk * c.group + h] - slab.final_top[h];
  exp_few(factor, factor, c.group);
  const float share = c.a.reduce == MEAN ? 1.0f / float(c.group) : 1.0f;
  for (int h = 0; h < c.group; ++h) factor[h] *= slab.inverse[h] * share;
}

MP_INLINE vf received(const Call& c, const float* weights, const float* factor) {
  vf p = load(weights) * factor[0];
  if (c.a.reduce == MAX)
    for (int h = 1; h < c.group; ++h) p = vmax(p, load(weights + h * CHUNK) * factor[h]);
  else
    for (int h = 1; h < c.group; ++h) p += load(weights + h * CHUNK) * factor[h];
  return p;
}

// Split number `split` of region r: accumulate where a signal is gathered, find the victim where `search` is set.
template <bool kGather, bool kSearch>
void score_part(const Call& c, int r, int split, const Slab& slab, float* factor) {
  const Part part = c.part(r, split);
  const Pool& pool = *part.pool;
  const int begin = (split - part.first_split) * SPLIT, end = std::min(begin + SPLIT, part.lens);
  const int first_slot = part.first_split > 0 ? PACKED : 0;
  const int32_t* pages = part.pages;
  const Valuation valuation(c, r);
  const vf decay = splat(c.a.signal == SUM ? float(c.a.decay) : 0.0f);
  const bool adds = c.a.signal == SUM;
  const bool reads = by_score(c.a.evict);
  Candidates found;
  for (int at = begin; at < end; at += CHUNK) {
    const int n = std::min(CHUNK, end - at);
    const int64_t chunk = chunk_of(part, at);
    const float* weights = slab.weights + chunk * c.group * CHUNK;
    if (kGather) chunk_factors(c, slab, chunk, factor);
    for (int i = 0; i < n;) {
      const int run = pool.run(at + i, at + n, CHUNK);
      float* acc = pool.score(pages, at + i);
      const int32_t* positions = pool.position(pages, at + i);
      for (int j = 0; j < run; j += W) {
        const int rest = run - j;
        vf score{};
        if (kGather) {
          score = received(c, weights + i + j, factor);
          if (adds) score += decay * (rest >= W ? load(acc + j) : load_part(acc + j, rest));
          rest >= W ? store(acc + j, score) : store_part(acc + j, score, rest);
        } else if (kSearch && reads) {
          score = rest >= W ? load(acc + j) : load_part(acc + j, rest);
        }
        if (kSearch) {
          const vi position = rest >= W ? load(positions + j) : load_part(positions + j, rest);
          const vf value = valuation.guard(valuation.raw(score, position), position);
          const vi there = (iota() < rest) & (position >= 0);
          found.consider(value, position, iota() + (first_slot + at + i + j), there);
        }
      }
      i += run;
    }
  }
  if (kSearch) slab.victims[split] = found.best();
}

inline void score_part(const Call& c, int r, int split, const Slab& slab, float* factor) {
  const bool search = c.full(r) && !averaged(c);
  if (c.gathers && search) return score_part<true, true>(c, r, split, slab, factor);
  if (c.gathers) return score_part<true, false>(c, r, split, slab, factor);
  if (search) return score_part<false, true>(c, r, split, slab, factor);
}

}  // namespace mp
