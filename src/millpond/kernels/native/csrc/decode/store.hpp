// Where the new entry goes: appended, in the victim's slot, or nowhere.
#pragma once

#include "decode/score.hpp"

namespace mp {

// Ask for the slot behind the last of region r, where its new entry goes unless another leaves for it. A step of a layer
// comes back to it when others have long taken its place in the caches.
inline void prefetch_slot(const Call& c, int r) {
  if (!c.active(r) || c.full(r)) return;
  const int32_t* pages = c.pages(r);
  const int64_t slot = c.a.lens[r], row[2] = {c.pool.key_dim * c.pool.item, c.pool.value_dim * c.pool.item};
  for (int which = 0; which < 2; ++which) {
    const char* to = c.pool.at(which, pages, slot, row[which]);
    for (int64_t i = 0; i < row[which]; i += 64) __builtin_prefetch(to + i, 1, 3);
  }
  __builtin_prefetch(c.pool.position(pages, slot), 1, 3);
  __builtin_prefetch(c.pool.score(pages, slot), 1, 3);
}

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

// Slot `slot` of region r's packed part holds no entry any more: sealed codes are never written again.
inline void bury(const Call& c, int r, int slot) {
  *c.packed_pool.position(c.packed_part(r).pages, slot) = -1;
  c.packed->dead[r] += 1;
}

// The new entry competes too, in the slot behind the last. `raw`: its value before protection.
inline void replace(const Call& c, int r, Victim victim, float raw, float score) {
  const Valuation valuation(c, r);
  const vi position = splat(int32_t(c.position(r)));
  victim.consider(valuation.guard(splat(raw), position)[0], c.position(r), c.a.lens[r]);
  if (victim.slot == INT32_MAX) victim.position = c.position(r);  // only NaN: nothing can be compared
  if (victim.slot >= PACKED && victim.slot != INT32_MAX) {
    bury(c, r, victim.slot - PACKED);
    append(c, r, score);
  } else if (victim.slot < c.a.lens[r]) {
    put_entry(c, r, victim.slot, score);
  }
  c.a.evicted[r] = victim.position;
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

// f(positions, scores, their place in `mean`, first slot, n) for all slots of region r, W at a time.
template <class F>
inline void for_slots(const Call& c, int r, float* mean, F&& f) {
  const Part parts[2] = {c.plain_part(r), c.packed != nullptr ? c.packed_part(r) : Part{}};
  for (int i = 0; i < (c.packed != nullptr ? 2 : 1); mean += parts[i++].lens) {
    const Part& part = parts[i];
    for (int at = 0; at < part.lens;) {
      const int run = part.pool->run(at, part.lens, SPLIT);
      const int32_t* positions = part.pool->position(part.pages, at);
      const float* acc = part.pool->score(part.pages, at);
      for (int j = 0; j < run; j += W) {
        const int rest = std::min(run - j, W);
        f(load_part(positions + j, rest), load_part(acc + j, rest), mean + at + j, (i > 0 ? PACKED : 0) + at + j, rest);
      }
      at += run;
    }
  }
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
    for_slots(c, r, mean, [&](vi position, vf acc, float* to, int, int rest) {
      vf value = valuation.raw(acc, position);
      if (h > 0) value += load_part(to, rest);
      store_part(to, value, rest);
    });
  }
  for (int h = 0; h < heads; ++h) {
    const int r = first + h;
    if (!c.full(r)) {
      append(c, r, scores[h]);
      continue;
    }
    const Valuation valuation(c, r);
    Candidates found;
    for_slots(c, r, mean, [&](vi position, vf, const float* from, int slot, int rest) {
      const vf value = valuation.guard(load_part(from, rest) / share, position);
      found.consider(value, position, iota() + slot, (iota() < rest) & (position >= 0));
    });
    replace(c, r, found.best(), own / share, scores[h]);
  }
}

}  // namespace mp
