// The parts of a region's attention, the new entry and the sink logit put together: output and log-sum-exp.
#pragma once

#include <cmath>

#include "common/softmax.hpp"
#include "decode/attend.hpp"
#include "decode/shared_parts.hpp"

namespace mp {

// The logit of the new entry, whose key counts as stored: rounded to the pages' dtype. Rows are padded with zeros.
inline float new_logit(const Call& c, const float* query, const float* key) {
  vf dot{};
  for (int d = 0; d < int(c.pool.key_dim); d += W) dot += load(query + d) * load(key + d);
  const float s = sum(dot) * float(c.a.scale);
  return c.a.softcap != 0 ? tanh(splat(s / float(c.a.softcap)))[0] * float(c.a.softcap) : s;
}

inline float exp_one(float x) { return exp(splat(x))[0]; }

// Write out and lse of region r; leave its maximum and 1 / denominator in the slab.
// Returns the new entry's probability, reduced over the group. `shared`: what it found in shared entries; null for none.
inline float merge(const Call& c, int r, const Slab& slab, const Scratch& scratch, const SharedParts* shared = nullptr) {
  const int group = c.group, n = c.splits(r), value_dim = int(c.pool.value_dim);
  const int key_dim = int(c.pool.key_dim), key_pad = int(round_up(key_dim, W));
  float *query = scratch.rows, *key = query + key_pad, *value = key + key_pad;
  std::fill(query, value + c.out_stride, 0.0f);
  widen_as_stored(key, c.new_key(r), c.a.k_dtype, c.pool.dtype, key_dim);
  widen_as_stored(value, c.new_value(r), c.a.v_dtype, c.pool.dtype, value_dim);
  float received = 0.0f;
  for (int h = 0; h < group; ++h) {
    const int64_t row = int64_t(c.seq(r)) * c.a.n_heads + c.query_head(r) + h;
    widen(query, c.query(r, h), c.a.q_dtype, key_dim);
    const float logit = new_logit(c, query, key);
    const float* sink = c.a.sink_logits != nullptr ? c.a.sink_logits + c.query_head(r) + h : nullptr;
    float top = logit;
    if (sink != nullptr) top = std::max(top, *sink);
    for (int i = 0; i < n; ++i) top = std::max(top, slab.top[i * group + h]);
    if (shared != nullptr)
      shared->for_found(r, h, [&](const FoundRow& found) { top = std::max(top, found.top / LOG2_E); });
    const float weight = exp_one(logit - top);
    float* sums = slab.out + int64_t(h) * c.out_stride;  // part 0 takes the others in
    float total = 0.0f;
    for (int i = 0; i < n; ++i) {
      const float factor = exp_one(slab.top[i * group + h] - top);
      total += factor * slab.total[i * group + h];
      const float* part = slab.out + (int64_t(i) * group + h) * c.out_stride;
      for (int d = 0; d < c.out_stride; d += W)
        store(sums + d, i == 0 ? load(part + d) * factor : load(sums + d) + load(part + d) * factor);
    }
    if (shared != nullptr)
      shared->for_found(r, h, [&](const FoundRow& found) {
        const float factor = exp_one(found.top / LOG2_E - top);
        total += factor * found.total;
        for (int d = 0; d < c.out_stride; d += W) store(sums + d, load(sums + d) + load(found.out + d) * factor);
      });
    total += weight;
    if (sink != nullptr) total += exp_one(*sink - top);
    const float inverse = 1.0f / total;
    char* out = static_cast<char*>(c.a.out) + row * value_dim * dtype_bytes(c.a.q_dtype);
    for (int d = 0; d < c.out_stride; d += W) store(sums + d, (load(sums + d) + load(value + d) * weight) * inverse);
    narrow(out, c.a.q_dtype, sums, value_dim);
    c.a.lse[row] = top + std::log(total);
    slab.final_top[h] = top;
    slab.inverse[h] = inverse;
    const float p = weight * inverse;
    received = h == 0 ? p : c.a.reduce == MAX ? std::max(received, p) : received + p;
  }
  return c.a.reduce == MEAN ? received / float(group) : received;
}

// A sequence that takes no part.
inline void leave_out(const Call& c, int r) {
  const int64_t row = int64_t(c.seq(r)) * c.a.n_heads + c.query_head(r), dim = c.pool.value_dim;
  const int64_t item = dtype_bytes(c.a.q_dtype);
  std::memset(static_cast<char*>(c.a.out) + row * dim * item, 0, size_t(c.group * dim * item));
  for (int h = 0; h < c.group; ++h) c.a.lse[row + h] = -__builtin_inff();
  c.a.evicted[r] = -1;
}

}  // namespace mp
