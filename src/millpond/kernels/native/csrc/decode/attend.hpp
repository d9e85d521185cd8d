// Attention of one region's queries over a range of its slots: one pass over keys and values, chunk by chunk.
#pragma once

#include "common/maths.hpp"
#include "decode/region.hpp"
#include "decode/weighted_values.hpp"

namespace mp {

// Per thread: the queries of a region, the weights of a chunk, and a few rows.
struct Scratch {
  float *query, *weights, *bias, *factors, *rows;
  float *packed_query, *folded, *packed_bias;  // see packed_attend.hpp
  float* turned;                               // see quantized/pre_rope_keys.hpp
  Scratch(const Call& c, char* memory) {
    float* p = reinterpret_cast<float*>(memory);
    auto take = [&p](int64_t n) { return std::exchange(p, p + round_up(n, W)); };
    query = take(c.group * round_up(c.a.pool.key_dim, QUERY_PAD));
    weights = take(c.group * CHUNK + W);
    bias = take(CHUNK);
    factors = take(c.group + W);
    rows = take(2 * round_up(c.a.pool.key_dim, W) + c.out_stride);
    packed_query = take(packed_query_floats(c));
    folded = take(folded_floats(c));
    packed_bias = take(packed_bias_floats(c));
    turned = take(turned_floats(c));
  }
  static int64_t bytes(const Call& c) {
    const int64_t query = c.group * round_up(c.a.pool.key_dim, QUERY_PAD), rows = 2 * c.a.pool.key_dim + c.out_stride;
    const int64_t packed = packed_query_floats(c) + folded_floats(c) + packed_bias_floats(c) + turned_floats(c);
    return round_up(4 * (query + int64_t(c.group) * (CHUNK + 1) + CHUNK + rows + packed + 16 * W), 4096);
  }
  // The queries as packed keys meet them; as weights, which the weights of a run of values replace; per head and group
  // of channels what the zeros add, and per head what the mean of a page adds.
  static int64_t packed_query_floats(const Call& c) {
    return c.packed != nullptr ? c.group * round_up(c.packed->pool.key_dim, QUERY_PAD) : 0;
  }
  static int64_t folded_floats(const Call& c) {
    return c.packed != nullptr ? c.group * std::max<int64_t>(round_up(c.packed->pool.key_dim, QUERY_PAD), CHUNK) : 0;
  }
  static int64_t packed_bias_floats(const Call& c) {
    if (c.packed == nullptr) return 0;
    return c.group * (std::max<int64_t>(2 * (c.packed->pool.key_dim / LANES), W * (c.packed->pool.value_dim / LANES)) + 1);
  }
  // 32 keys as numbers, the scales and zeros of their group, their cosines and sines, and the queries of a run.
  static int64_t turned_floats(const Call& c) {
    if (c.packed == nullptr || c.packed->rope.pairs == nullptr) return 0;
    return (34 + c.group) * round_up(c.packed->pool.key_dim, QUERY_PAD) + 2 * 32 * c.packed->rope.n_pairs;
  }
};

// The queries of region r in the type that they meet the keys in, rows padded with zeros.
template <class Q>
inline void load_queries(const Call& c, int r, int stride, Q* to) {
  constexpr bool rounded = sizeof(Q) == 2;
  std::memset(to, 0, size_t(c.group) * size_t(stride) * sizeof(Q));
  for (int h = 0; h < c.group; ++h)
    copy_row(to + h * stride, rounded ? BF16 : F32, c.query(r, h), c.a.q_dtype, c.pool.key_dim);
}

// weights[i] of one head: logits in, exp(logit - top) out. Returns the sum; raises `top` to the running maximum.
inline float soften(const Call& c, float* weights, int n, const float* bias, float& top) {
  const vf scale = splat(float(c.a.scale)), cap = splat(float(c.a.softcap));
  const vf inverse_cap = splat(c.a.softcap != 0 ? float(1.0 / c.a.softcap) : 0.0f);
  vf best = splat(top);
  for (int i = 0; i < n; i += W) {
    vf s = load(weights + i) * scale;
    if (c.a.softcap != 0) s = tanh(s * inverse_cap) * cap;
    if (bias != nullptr) s = s + load(bias + i);
    if (n - i < W) s = select(iota() < n - i, s, splat(-__builtin_inff()));
    best = vmax(s, best);
    store(weights + i, s);
  }
  top = max(best);
  vf total{};
  for (int i = 0; i < n; i += W) {
    const vf e = exp(load(weights + i) - top);
    total += e;
    store(weights + i, e);
  }
  return sum(total);
}

// What is added to the logit of slot begin + i: its log mass, -inf where the sliding window hides it or nothing is left.
inline void slot_bias(const Call& c, int r, const Part& part, int begin, int n, float* bias) {
  const int32_t* pages = part.pages;
  const Pool& pool = *part.pool;
  const int64_t youngest = c.a.window > 0 ? int64_t(c.position(r)) - c.a.window : INT64_MIN;
  const int64_t oldest = part.holes ? std::max<int64_t>(youngest, -1) : youngest;  // hidden at or below
  for (int i = 0; i < n;) {
    const int run = pool.run(begin + i, begin + n, CHUNK);
    const int32_t* position = pool.position(pages, begin + i);
    if (!pool.masses) {
      for (int j = 0; j < run; ++j) bias[i + j] = position[j] <= oldest ? -__builtin_inff() : 0.0f;
    } else {
      const float* log_mass = pool.log_mass(pages, begin + i);
      for (int j = 0; j < run; ++j) bias[i + j] = position[j] <= oldest ? -__builtin_inff() : log_mass[j];
    }
    i += run;
  }
}

// The online softmax of one chunk: logits to weights, and what came before rescaled to the new maximum.
inline void soften_chunk(const Call& c, int r, const Part& part, int at, int n, const Slab& slab, const Scratch& scratch,
                         float* weights, float* top, float* total, float* out) {
  const float* bias = nullptr;
  if (c.a.window > 0 || part.pool->masses || part.holes) slot_bias(c, r, part, at, n, scratch.bias), bias = scratch.bias;
  for (int h = 0; h < c.group; ++h) {
    const float before = top[h];
    const float added = soften(c, weights + h * CHUNK, n, bias, top[h]);
    if (c.gathers) slab.chunk_top[chunk_of(part, at) * c.group + h] = top[h];
    if (before != top[h]) {
      const vf factor = exp(splat(before - top[h]));
      total[h] *= factor[0];
      float* o = out + h * c.out_stride;
      for (int d = 0; d < c.out_stride; d += W) store(o + d, load(o + d) * factor);
    }
    total[h] += added;
  }
}

// The chunk of slots that will be read after the current one: `n` slots from `at` on.
struct Ahead {
  const int32_t* pages;
  int at, n;
};

// Part number `split` of region r. `next()`: the first chunk of the work item that is likely to follow.
template <class T, class Next>
void attend(const Call& c, int r, int split, const Slab& slab, const Scratch& scratch, const Next& next) {
  using Q = typename Lane<T>::Q;
  const int group = c.group, key_dim = int(c.pool.key_dim), value_dim = int(c.pool.value_dim);
  const int q_stride = int(round_up(key_dim, QUERY_PAD));
  const int begin = split * SPLIT, end = std::min(begin + SPLIT, int(c.a.lens[r]));
  const int32_t* pages = c.pages(r);
  float* top = slab.top + split * group;
  float* total = slab.total + split * group;
  float* out = slab.out + int64_t(split) * group * c.out_stride;
  for (int h = 0; h < group; ++h) top[h] = LOW, total[h] = 0.0f;
  std::memset(out, 0, size_t(group) * size_t(c.out_stride) * 4);
  Q* query = reinterpret_cast<Q*>(scratch.query);
  load_queries(c, r, q_stride, query);
  constexpr int RUN = 32;  // slots whose values stay in the L1 cache between the blocks of the output row
  for (int at = begin; at < end; at += CHUNK) {
    const int n = std::min(CHUNK, end - at);
    const Ahead ahead = at + CHUNK < end ? Ahead{pages, at + CHUNK, std::min(CHUNK, end - at - CHUNK)} : next();
    float* weights = c.gathers ? slab.weights + int64_t(at / CHUNK) * group * CHUNK : scratch.weights;
    for (int i = 0; i < n;) {
      const int run = c.pool.run(at + i, at + n, RUN);
      const char* key = c.pool.key(pages, at + i);
      const char* later = i + run < n ? c.pool.key(pages, at + i + run) : c.pool.value(pages, at);
      dot_run<T>(reinterpret_cast<const T*>(key), int(round_up(run, 4)), key_dim, query, q_stride, group, weights + i,
                 CHUNK, later);
      i += run;
    }
    soften_chunk(c, r, c.plain_part(r), at, n, slab, scratch, weights, top, total, out);
    for (int i = 0; i < n;) {
      const int run = c.pool.run(at + i, at + n, RUN);
      const char* value = c.pool.value(pages, at + i);
      const char* later = i + run < n ? c.pool.value(pages, at + i + run) : ahead.n > 0 ? c.pool.key(ahead.pages, ahead.at) : value;
      weigh_run<T>(reinterpret_cast<const T*>(value), run, value_dim, weights + i, CHUNK, group, out, c.out_stride, later);
      i += run;
    }
  }
}

}  // namespace mp
