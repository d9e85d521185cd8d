// Logits of packed keys. Lanes are slots, so that a tile row holds a few channels of 16 keys.
//
// Scales per channel are folded into the query once per group of slots, scales per slot into the sums; what the zeros
// add is one number per head and group, or per slot.
#pragma once

#include "decode/dot.hpp"
#include "quantized/packed.hpp"

namespace mp {

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
  float* bias;         // (group,) by channel; (group, groups, 2) by slot
  float* units;        // (group,) or (group, groups): of whole weights
  int stride;
  float most;          // the largest whole weight
};

// The factors of one group: x = scale * code + zero per channel, zero = -half * scale where none is stored.
struct Factors {
  const void *scales, *zeros;
  bool wide;   // float, not f16
  bool same;   // one scale for all
  float half;

  // W of them from number d on; zeros from number d + rest on.
  MP_INLINE vf get(const void* from, int d, int rest) const {
    if (wide) {
      const float* p = static_cast<const float*>(from) + (same ? 0 : d);
      return same ? splat(*p) : rest >= W ? load(p) : load_part(p, std::max(rest, 0));
    }
    const f16* p = static_cast<const f16*>(from) + d;
    return rest >= W ? load(p) : load_part(p, std::max(rest, 0));
  }
};

// What a symmetric code stands above zero.
inline float half_of(const SideArgs& a) {
  return a.zeros >= 0 || a.fixed_zeros != nullptr || a.format == FP8 || is_table(int(a.format)) ? 0.0f : float(1 << (bits_of(int(a.format)) - 1));
}

MP_INLINE vf size_of(vf x) { return vmax(x, -x); }

// The unit of whole weights of which the largest is `top`, and how many of it are 1.
MP_INLINE float unit_of(float top, float most, float& per_unit) {
  per_unit = top > 0.0f ? most / top : 0.0f;
  return top / most;
}

// Fold the scales and zeros of `dim` channels into the queries of H heads from head `h0` on.
template <int F, int H>
MP_INLINE void fold_channels(const Factors& f, float offset, int dim, const Folded& to, int h0) {
  const float* q = to.query + h0 * to.stride;
  Weight* w = to.weights + h0 * to.stride;
  float per_unit[H] = {};
  if constexpr (is_whole(F)) {
    vf top[H] = {};
    for (int d = 0; d < dim; d += W) {
      const vf scale = f.get(f.scales, d, dim - d);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) top[h] = vmax(top[h], size_of(load(q + h * to.stride + d) * scale));
    }
    for (int h = 0; h < H; ++h) to.units[h0 + h] = unit_of(max(top[h]), to.most, per_unit[h]);
  }
  vf weight[H] = {}, by_zero[H] = {};
  for (int d = 0; d < dim; d += 2 * W) {
    const vf scale = f.get(f.scales, d, dim - d), later = f.get(f.scales, d + W, dim - d - W);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const vf a = load(q + h * to.stride + d), b = load(q + h * to.stride + d + W);
      weight[h] = put_weights<F>(w + h * to.stride + d, a * scale, b * later, per_unit[h], weight[h]);
    }
    if (f.zeros == nullptr) continue;
    const vf zero = f.get(f.zeros, d, dim - d), next = f.get(f.zeros, d + W, dim - d - W);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h)
      by_zero[h] += load(q + h * to.stride + d) * zero + load(q + h * to.stride + d + W) * next;
  }
  for (int h = 0; h < H; ++h) {
    const float unit = is_whole(F) ? to.units[h0 + h] : 1.0f;
    to.bias[h0 + h] = sum(by_zero[h] - weight[h] * ((offset + f.half) * unit));
  }
}

// sums[h][tile] of words [first, last) for two tiles of 16 keys and H heads, from weights of word `first` on.
template <int F, int H>
MP_INLINE void key_tiles(const char* low, const char* top, int64_t tile_low, int64_t tile_top, int first, int last,
                         const Weight* w, int stride, const Table& table, Later& later, Sum<F> (&sums)[H][2][PARTS]) {
  constexpr int PER = per_word(F);
  for (int j = first; j < last; ++j, w += PER) {
    later.step();
    const Words a = load_words<F>(low, top, j), b = load_words<F>(low + tile_low, top + tile_top, j);
#pragma GCC unroll UNROLL
    for (int k = 0; k < PER / 2; ++k) {
      const Pair pa = unpack<F>(a, j, k, table), pb = unpack<F>(b, j, k, table);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        add_pair<F>(sums[h][0], pa, w + h * stride + 2 * k);
        add_pair<F>(sums[h][1], pb, w + h * stride + 2 * k);
      }
    }
  }
}

// A run of 32 keys of a page.
struct KeyRun {
  const char *low, *top;
  int64_t tile_low, tile_top;  // bytes from one tile to the next
  int words;
};

template <int F>
inline KeyRun key_run(const PackedPool& p, const char* page, int slot) {
  const SideArgs& a = p.a.key;
  const int64_t dim = p.pool.key_dim, low = low_words(F, dim) * TILE_BYTES, top = top_words(dim) * TILE_BYTES;
  const int64_t tile = slot / LANES;
  return {page + a.codes + tile * low, page + a.top + tile * top, low, top, int(low_words(F, dim))};
}

// Logits (heads, 32) of a run whose scales are folded into the weights.
template <int F, int H>
MP_INLINE void folded_logits(const KeyRun& run, const Folded& q, int h0, Later later, const Table& table, float* s, int s_stride) {
  Sum<F> sums[H][2][PARTS] = {};
  key_tiles<F, H>(run.low, run.top, run.tile_low, run.tile_top, 0, run.words, q.weights + h0 * q.stride, q.stride,
                  table, later, sums);
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
    for (int t = 0; t < 2; ++t)
      for (int i = 0; i < PARTS; ++i)
        store(s + (h0 + h) * s_stride + t * LANES + i * W, to_floats<F>(sums[h][t][i], q.units[h0 + h]) + q.bias[h0 + h]);
}

// Logits (heads, 32) of a run with scales per slot: (groups, slots) f16.
template <int F, int H>
MP_INLINE void slotwise_logits(const KeyRun& run, const Folded& q, int h0, Later later, const f16* scales, const f16* zeros, int slots,
                               int group, int groups, const Table& table, float* s, int s_stride) {
  const int words = group / per_word(F);
  for (int g = 0; g < groups; ++g) {
    Sum<F> sums[H][2][PARTS] = {};
    const int first = g * words, last = g + 1 == groups ? run.words : first + words;
    key_tiles<F, H>(run.low, run.top, run.tile_low, run.tile_top, first, last,
                    q.weights + h0 * q.stride + g * group, q.stride, table, later, sums);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const int at_group = (h0 + h) * groups + g;
      const float* bias = q.bias + 2 * at_group;  // sums of the weights, sums of the query
      for (int t = 0; t < 2; ++t)
        for (int i = 0; i < PARTS; ++i) {
          const int at = t * LANES + i * W;
          vf x = (to_floats<F>(sums[h][t][i], q.units[at_group]) - bias[0]) * load(scales + g * slots + at);
          if (zeros != nullptr) x += bias[1] * load(zeros + g * slots + at);
          float* to = s + (h0 + h) * s_stride + at;
          store(to, g == 0 ? x : load(to) + x);
        }
    }
  }
}

// The query as weights, and per group what is subtracted before a slot's scale and what its zero is multiplied with.
template <int F>
inline void fold_slotwise(float offset, int dim, int group, int groups, int heads, const Folded& to) {
  for (int h = 0; h < heads; ++h)
    for (int g = 0; g < groups; ++g) {
      const int first = g * group, last = int(round_up(g + 1 == groups ? dim : first + group, 2 * W));
      const float* q = to.query + h * to.stride;
      vf weight{}, query{}, top{};
      for (int d = first; d < last; d += W) top = vmax(top, size_of(load(q + d)));
      float per_unit;
      const float unit = to.units[h * groups + g] = unit_of(max(top), to.most, per_unit);
      for (int d = first; d < last; d += 2 * W) {
        const vf a = load(q + d), b = load(q + d + W);
        query += a + b;
        weight = put_weights<F>(to.weights + h * to.stride + d, a, b, per_unit, weight);
      }
      float* bias = to.bias + 2 * (h * groups + g);
      bias[0] = offset * (is_whole(F) ? unit : 1.0f) * sum(weight);
      bias[1] = sum(query);
    }
}

// What the mean (dim,) of the keys of a page adds to every logit of it: (heads,).
inline void mean_logits(const SideArgs& a, const char* page, int dim, const Folded& q, int heads, float* to) {
  const f16* means = halves(page, a.means);
  for (int h = 0; h < heads; ++h) {
    vf total{};
    for (int d = 0; d < dim; d += W) total += load(q.query + h * q.stride + d) * load(means + d);
    to[h] = sum(total);
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
