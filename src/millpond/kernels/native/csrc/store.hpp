// Where the new entry goes: appended, in the victim's slot, or nowhere.
#pragma once

#include "score.hpp"

namespace mp {

inline void put_entry(const Call& c, int r, int slot, float score) {
  const int32_t* pages = c.pages(r);
  copy_row(c.pool.key(pages, slot), c.pool.dtype, c.new_key(r), c.a.k_dtype, c.pool.key_dim);
  copy_row(c.pool.value(pages, slot), c.pool.dtype, c.new_value(r), c.a.v_dtype, c.pool.value_dim);
  *c.pool.position(pages, slot) = c.position(r);
  *c.pool.score(pages, slot) = score;
  if (c.pool.masses) *c.pool.log_mass(pages, slot) = 0.0f;
}

inline void append(const Call& c, int r, float score) {
  put_entry(c, r, c.a.lens[r], score);
  c.a.lens[r] += 1;
  c.a.evicted[r] = -1;
}

// The new entry competes too, in the slot behind the last. `raw`: its value before protection.
inline void replace(const Call& c, int r, Victim victim, float raw, float score) {
  const Valuation valuation(c, r);
  const vi position = splat(int32_t(c.position(r)));
  victim.consider(valuation.guard(splat(raw), position)[0], c.position(r), c.a.lens[r]);
  if (victim.slot == INT32_MAX) victim.position = c.position(r);  // only NaN: nothing can be compared
  c.a.evicted[r] = victim.position;
  if (victim.slot < c.a.lens[r]) put_entry(c, r, victim.slot, score);
}

// Region r on its own, after its scoring pass. `score`: the new entry's accumulator.
inline void store_alone(const Call& c, int r, const Slab& slab, float score) {
  if (!c.full(r)) return append(c, r, score);
  Victim victim;
  for (int i = 0; i < c.splits(r); ++i) {
    const Victim& v = slab.victims[i];
    if (v.slot != INT32_MAX) victim.consider(v.value, v.position, v.slot);
  }
  const Valuation valuation(c, r);
  replace(c, r, victim, valuation.raw(splat(score), splat(int32_t(c.position(r))))[0], score);
}

// All regions of one sequence, whose entries lie in the same slots: values averaged over the KV heads.
// `mean`: room for the longest region. `scores`: the new entries' accumulators, by head.
inline void store_shared(const Call& c, int seq, float* mean, const float* scores) {
  const int heads = int(c.a.n_kv_heads), first = seq * heads;
  const float share = float(heads);
  bool any_full = false;
  for (int h = 0; h < heads; ++h) any_full |= c.full(first + h);
  float own = 0.0f;
  for (int h = 0; any_full && h < heads; ++h) {
    const int r = first + h;
    const Valuation valuation(c, r);
    own += valuation.raw(splat(scores[h]), splat(int32_t(c.position(r))))[0];
    for (int i = 0; i < c.a.lens[r];) {
      const int run = c.pool.run(i, c.a.lens[r], SPLIT);
      const float* acc = c.pool.score(c.pages(r), i);
      const int32_t* positions = c.pool.position(c.pages(r), i);
      for (int j = 0; j < run; j += W) {
        const int rest = std::min(run - j, W);
        vf value = valuation.raw(load_part(acc + j, rest), load_part(positions + j, rest));
        if (h > 0) value += load_part(mean + i + j, rest);
        store_part(mean + i + j, value, rest);
      }
      i += run;
    }
  }
  for (int h = 0; h < heads; ++h) {
    const int r = first + h;
    if (!c.full(r)) {
      append(c, r, scores[h]);
      continue;
    }
    const Valuation valuation(c, r);
    Candidates found;
    for (int i = 0; i < c.a.lens[r];) {
      const int run = c.pool.run(i, c.a.lens[r], SPLIT);
      const int32_t* positions = c.pool.position(c.pages(r), i);
      for (int j = 0; j < run; j += W) {
        const int rest = std::min(run - j, W);
        const vi position = load_part(positions + j, rest);
        const vf value = valuation.guard(load_part(mean + i + j, rest) / share, position);
        found.consider(value, position, iota() + (i + j), iota() < rest);
      }
      i += run;
    }
    replace(c, r, found.best(), own / share, scores[h]);
  }
}

}  // namespace mp
