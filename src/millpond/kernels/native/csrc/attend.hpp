// Attention of one region's queries over a range of its slots: one pass over keys and values, chunk by chunk.
#pragma once

#include "maths.hpp"
#include "region.hpp"
#include "weigh.hpp"

namespace mp {

// Per thread: the queries of a region and the weights of a chunk.
struct Scratch {
  static int64_t bytes(const Call& c) {
    const int64_t q = c.group * round_up(c.a.pool.key_dim, QUERY_PAD);
    return round_up(4 * (q + int64_t(c.group) * (CHUNK + 3) + CHUNK + 4 * W), 4096);
  }
  float *query, *weights, *bias, *correction;
  Scratch(const Call& c, char* memory) {
    query = reinterpret_cast<float*>(memory);
    weights = query + c.group * round_up(c.a.pool.key_dim, QUERY_PAD);
    bias = weights + c.group * CHUNK + W;
    correction = bias + CHUNK + W;
  }
};

MP_INLINE void prefetch_rows(const char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
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

// bias[i] = -inf where the sliding window hides slot begin + i, else 0.
inline void window_bias(const Call& c, int r, int begin, int n, float* bias) {
  const int32_t* pages = c.pages(r);
  const int64_t oldest = int64_t(c.position(r)) - c.a.window;  // hidden at or below
  for (int i = 0; i < n;) {
    const int run = c.pool.run(begin + i, begin + n, CHUNK);
    const int32_t* position = c.pool.position(pages, begin + i);
    for (int j = 0; j < run; ++j) bias[i + j] = position[j] <= oldest ? -__builtin_inff() : 0.0f;
    i += run;
  }
}

// Slots begin .. end of region r, part number `split`.
template <class T>
void attend(const Call& c, int r, int split, const Slab& slab, const Scratch& scratch) {
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
  for (int h = 0; h < group; ++h) {
    const void* row = offset(c.a.q, c.a.q_dtype, c.seq(r) * c.a.q_seq + (c.query_head(r) + h) * c.a.q_head);
    for (int d = 0; d < q_stride; ++d)
      put_query(query + h * q_stride + d, d < key_dim ? get_number(row, c.a.q_dtype, d) : 0.0f);
  }
  constexpr int RUN = 32;  // slots whose values stay in the L1 cache between the blocks of the output row
  for (int at = begin; at < end; at += CHUNK) {
    const int n = std::min(CHUNK, end - at);
    float* weights = c.gathers ? slab.weights + int64_t(at / CHUNK) * group * CHUNK : scratch.weights;
    for (int i = 0; i < n;) {
      const int run = c.pool.run(at + i, at + n, RUN);
      prefetch_rows(c.pool.value(pages, at + i), run * value_dim * int64_t(sizeof(T)));
      const T* key = reinterpret_cast<const T*>(c.pool.key(pages, at + i));
      dot_run<T>(key, int(round_up(run, 4)), key_dim, query, q_stride, group, weights + i, CHUNK);
      i += run;
    }
    const float* bias = nullptr;
    if (c.a.window > 0) window_bias(c, r, at, n, scratch.bias), bias = scratch.bias;
    for (int h = 0; h < group; ++h) {
      const float before = top[h];
      const float added = soften(c, weights + h * CHUNK, n, bias, top[h]);
      scratch.correction[h] = before - top[h];
      if (c.gathers) slab.chunk_top[int64_t(at / CHUNK) * group + h] = top[h];
      if (before != top[h]) {
        exp_few(scratch.correction + h, scratch.correction + h, 1);
        const vf factor = splat(scratch.correction[h]);
        total[h] *= scratch.correction[h];
        float* o = out + h * c.out_stride;
        for (int d = 0; d < c.out_stride; d += W) store(o + d, load(o + d) * factor);
      }
      total[h] += added;
    }
    for (int i = 0; i < n;) {
      const int run = c.pool.run(at + i, at + n, RUN);
      const int ahead = at + i + CHUNK;
      if (ahead < end) prefetch_rows(c.pool.key(pages, ahead), run * key_dim * int64_t(sizeof(T)));
      const T* value = reinterpret_cast<const T*>(c.pool.value(pages, at + i));
      weigh_run<T>(value, run, value_dim, weights + i, CHUNK, group, out, c.out_stride);
      i += run;
    }
  }
}

}  // namespace mp
