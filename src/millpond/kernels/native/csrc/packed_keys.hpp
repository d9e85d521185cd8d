// Logits of packed keys. Lanes are slots, so that a tile row holds a few channels of 16 keys.
//
// Scales per channel are folded into the query once per group of slots, scales per slot into the sums; what the zeros
// add is one number per head and group, or per slot.
#pragma once

#include "ahead.hpp"
#include "dot.hpp"
#include "packed.hpp"

namespace mp {

constexpr int RUN = 32;  // slots that are worked on at once: two tiles

// Call f(H as a constant, first head) until `heads` heads are done, as many at once as there are registers for.
template <class F>
MP_INLINE void for_heads(int heads, const F& f) {
  int h = 0;
  for (; h + HEADS <= heads; h += HEADS) f(std::integral_constant<int, HEADS>{}, h);
  if (HEADS > 3 && heads - h == 3)
    f(std::integral_constant<int, (HEADS > 3 ? 3 : 1)>{}, h);
  else if (HEADS > 2 && heads - h == 2)
    f(std::integral_constant<int, (HEADS > 2 ? 2 : 1)>{}, h);
  else if (heads - h == 1)
    f(std::integral_constant<int, 1>{}, h);
}

// The queries of a region as the keys of one group meet them.
struct Folded {
  const float* query;  // (group, stride): gathered and balanced
  Weight* weights;     // (group, stride)
  float* bias;         // (group,)
  int stride;
};

// The factors of one group: x = scale * code + zero per channel, zero = -half * scale where none is stored.
struct Factors {
  const void *scales, *zeros;
  bool wide;   // float, not f16
  bool same;   // one scale for all
  float half;

  MP_INLINE vf get(const void* from, int d, int rest) const {
    if (wide) {
      const float* p = static_cast<const float*>(from) + (same ? 0 : d);
      return same ? splat(*p) : rest >= W ? load(p) : load_part(p, rest);
    }
    const f16* p = static_cast<const f16*>(from) + d;
    return rest >= W ? load(p) : load_part(p, rest);
  }
};

// What a symmetric code stands above zero.
inline float half_of(const SideArgs& a) {
  return a.zeros >= 0 || a.fixed_zeros != nullptr || a.format == FP8 || is_table(int(a.format)) ? 0.0f : float(1 << (bits_of(int(a.format)) - 1));
}

// Fold the scales and zeros of `dim` channels into the queries of `heads` heads.
inline void fold_channels(const Factors& f, float offset, int dim, int heads, const Folded& to) {
  for (int h = 0; h < heads; ++h) {
    const float* q = to.query + h * to.stride;
    Weight* w = to.weights + h * to.stride;
    vf by_zero{}, weight{};
    for (int d = 0; d < dim; d += W) {
      const vf query = load(q + d);
      weight += put_weights(w + d, query * f.get(f.scales, d, dim - d));
      if (f.zeros != nullptr) by_zero += query * f.get(f.zeros, d, dim - d);
    }
    to.bias[h] = sum(by_zero) - (offset + f.half) * sum(weight);
  }
}

// sums[h][tile] of words [first, last) for two tiles of 16 keys and H heads, from weights of word `first` on.
template <int F, int H>
MP_INLINE void key_tiles(const char* low, const char* top, int64_t tile_low, int64_t tile_top, int first, int last,
                         const Weight* w, int stride, const Table& table, const char* ahead, vf (&sums)[H][2][PARTS]) {
  constexpr int PER = per_word(F);
  for (int j = first; j < last; ++j, w += PER) {
    prefetch<TILE_BYTES>(ahead + size_t(j) * TILE_BYTES);
    prefetch<TILE_BYTES>(ahead + tile_low + size_t(j) * TILE_BYTES);
    const Words a = load_words<F>(low, top, j), b = load_words<F>(low + tile_low, top + tile_top, j);
#pragma GCC unroll UNROLL
    for (int k = 0; k < PER / 2; ++k) {
      const Pair pa = unpack<F>(a, j, k, table), pb = unpack<F>(b, j, k, table);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        add_pair(sums[h][0], pa, w + h * stride + 2 * k);
        add_pair(sums[h][1], pb, w + h * stride + 2 * k);
      }
    }
  }
}

// A run of 32 keys of a page.
struct KeyRun {
  const char *low, *top, *ahead;
  int64_t tile_low, tile_top;  // bytes from one tile to the next
  int words;
};

template <int F>
inline KeyRun key_run(const PackedPool& p, const char* page, int slot, const char* later) {
  const SideArgs& a = p.a.key;
  const int64_t dim = p.pool.key_dim, low = low_words(F, dim) * TILE_BYTES, top = top_words(dim) * TILE_BYTES;
  const int64_t tile = slot / LANES;
  return {page + a.codes + tile * low, page + a.top + tile * top, later, low, top, int(low_words(F, dim))};
}

// Logits (heads, 32) of a run whose scales are folded into the weights.
template <int F, int H>
MP_INLINE void folded_logits(const KeyRun& run, const Folded& q, int h0, const Table& table, float* s, int s_stride) {
  vf sums[H][2][PARTS];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < PARTS; ++i) sums[h][0][i] = sums[h][1][i] = splat(q.bias[h0 + h]);
  key_tiles<F, H>(run.low, run.top, run.tile_low, run.tile_top, 0, run.words, q.weights + h0 * q.stride, q.stride,
                  table, run.ahead, sums);
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
    for (int t = 0; t < 2; ++t)
      for (int i = 0; i < PARTS; ++i) store(s + (h0 + h) * s_stride + t * LANES + i * W, sums[h][t][i]);
}

// Logits (heads, 32) of a run with scales per slot: (groups, slots) f16. bias: (heads, groups, 2), see `SlotBias`.
template <int F, int H>
MP_INLINE void slotwise_logits(const KeyRun& run, const Folded& q, int h0, const f16* scales, const f16* zeros, int slots,
                               int group, int groups, const Table& table, float* s, int s_stride) {
  const int words = group / per_word(F);
  for (int g = 0; g < groups; ++g) {
    vf sums[H][2][PARTS] = {};
    const int first = g * words, last = g + 1 == groups ? run.words : first + words;
    key_tiles<F, H>(run.low, run.top, run.tile_low, run.tile_top, first, last,
                    q.weights + h0 * q.stride + g * group, q.stride, table, run.ahead, sums);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const float* bias = q.bias + 2 * ((h0 + h) * groups + g);  // sums of the weights, sums of the query
      for (int t = 0; t < 2; ++t)
        for (int i = 0; i < PARTS; ++i) {
          const int at = t * LANES + i * W;
          vf x = (sums[h][t][i] - bias[0]) * load(scales + g * slots + at);
          if (zeros != nullptr) x += bias[1] * load(zeros + g * slots + at);
          float* to = s + (h0 + h) * s_stride + at;
          store(to, g == 0 ? x : load(to) + x);
        }
    }
  }
}

// The query as weights, and per group what is subtracted before a slot's scale and what its zero is multiplied with.
inline void fold_slotwise(float offset, int dim, int group, int groups, int heads, const Folded& to) {
  for (int h = 0; h < heads; ++h)
    for (int g = 0; g < groups; ++g) {
      vf weight{}, query{};
      const int last = g + 1 == groups ? dim : (g + 1) * group;
      for (int d = g * group; d < last; d += W) {
        const vf x = load(to.query + h * to.stride + d);
        query += x;
        weight += put_weights(to.weights + h * to.stride + d, x);
      }
      float* bias = to.bias + 2 * (h * groups + g);
      bias[0] = offset * sum(weight);
      bias[1] = sum(query);
    }
}

// Entries beside the codes of a page: what they add to the logits of its slots first .. first + n.
inline void extra_logits(const SideArgs& a, const char* page, int first, int n, const Folded& q, int heads, float* s,
                         int s_stride) {
  const uint16_t* where = reinterpret_cast<const uint16_t*>(page + a.extra);
  const f16* what = halves(page, a.extra + 2 * a.n_extra);
  for (int64_t i = 0; i < a.n_extra; ++i) {
    const int slot = (where[i] >> 8) - first, channel = where[i] & 255;
    if (slot < 0 || slot >= n) continue;
    const float x = load_part(what + i, 1)[0];
    for (int h = 0; h < heads; ++h) s[h * s_stride + slot] += x * q.query[h * q.stride + channel];
  }
}

}  // namespace mp
