// Sums of packed values weighted by probabilities. Lanes are channels, so that a tile row holds a few slots of 16 channels.
//
// Scales per slot are folded into the probabilities; what the zeros add is one number per head and group of channels.
#pragma once

#include "decode/region.hpp"
#include "decode/weighted_values.hpp"
#include "quantized/packed_keys.hpp"

namespace mp {

// Where the keys lie that are read after a chunk: those of the part, or of the next region.
struct NextKeys {
  const int32_t* pages = nullptr;
  int at = 0, n = 0;

  NextKeys() = default;
  NextKeys(const Call& c, int r, const Part& part, int end) : pages(part.pages), at(end), n(std::min(CHUNK, part.lens - end)) {
    if (n > 0 || r + 1 >= c.n_regions || !c.active(r + 1)) return;
    const Part next = c.packed_part(r + 1);
    pages = next.pages, at = 0, n = std::min(CHUNK, next.lens);
  }
};

// The values of slots at .. at + n of a part, n <= CHUNK, and the probabilities that weigh them: rows of CHUNK per head.
struct ValueChunk {
  const PackedPool& packed;
  const int32_t* pages;
  int at, n;
  const float* weights;

  const SideArgs& side() const { return packed.a.value; }
  int slot(int i) const { return (at + i) & int(packed.pool.slots - 1); }
  const char* page(int i) const { return packed.page(pages, at + i); }
};

// The probabilities of H heads as the values of one group of channels meet them.
template <int H>
struct FoldedProbabilities {
  const Weight* weights;  // (H, CHUNK)
  float units[H];         // of whole weights
  float bias[H];          // what is added to every channel of the group
};

// Factors of slots i .. i + W of a chunk for the channels of group g.
struct SlotFactors {
  const ValueChunk& c;
  Factors f;
  int64_t row;  // bytes from one group's to the next

  template <int F>
  static SlotFactors of(const ValueChunk& c, int g) {
    const bool one = F == FP8;
    const SideArgs& a = c.side();
    const int64_t row = one ? 0 : 2 * g * c.packed.pool.slots;
    return {c, {nullptr, nullptr, one, one, half_of(a)}, row};
  }
  MP_INLINE vf scale(int i) const { return f.get(c.page(i) + c.side().scales + row, c.slot(i), c.n - i); }
  MP_INLINE vf zero(int i) const { return f.get(c.page(i) + c.side().zeros + row, c.slot(i), c.n - i); }
};

MP_INLINE vf up_to(const float* p, int n) { return n >= W ? load(p) : load_part(p, std::max(n, 0)); }

// weights = p * scale, in the order of slots up to a whole run; bias = sum of p * zero - (offset + half) * weights.
// Slots from n on count nothing, whatever lies in them.
template <int F, int H>
MP_INLINE FoldedProbabilities<H> fold_slots(const ValueChunk& c, int h0, int g, Weight* to) {
  const SlotFactors factors = SlotFactors::of<F>(c, g);
  const float* p = c.weights + h0 * CHUNK;
  const bool has_zeros = c.side().zeros >= 0;
  FoldedProbabilities<H> out{to, {}, {}};
  float per_unit[H] = {};
  if constexpr (is_whole(F)) {
    vf top[H] = {};
    for (int i = 0; i < c.n; i += W) {
      const vf scale = factors.scale(i);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) top[h] = vmax(top[h], size_of(up_to(p + h * CHUNK + i, c.n - i) * scale));
    }
    for (int h = 0; h < H; ++h) out.units[h] = unit_of(max(top[h]), largest_weight(CHUNK), per_unit[h]);
  }
  vf weight[H] = {}, by_zero[H] = {};
  for (int i = 0; i < round_up(c.n, RUN); i += 2 * W) {
    const vf scale = factors.scale(i), later = factors.scale(i + W);
    const vf zero = has_zeros ? factors.zero(i) : vf{}, next = has_zeros ? factors.zero(i + W) : vf{};
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const vf a = up_to(p + h * CHUNK + i, c.n - i), b = up_to(p + h * CHUNK + i + W, c.n - i - W);
      by_zero[h] += a * zero + b * next;
      weight[h] = put_weights<F>(to + h * CHUNK + i, a * scale, b * later, per_unit[h], weight[h]);
    }
  }
  const float below = offset_of(F) + factors.f.half;
  for (int h = 0; h < H; ++h) out.bias[h] = sum(by_zero[h] - weight[h] * (below * (is_whole(F) ? out.units[h] : 1.0f)));
  return out;
}

// o[h][channels of N tiles from tile `first` on] += weights[h] . codes + bias[h].
template <int F, int H, int N>
void value_tiles(const ValueChunk& c, int first, const FoldedProbabilities<H>& p, const Table& table, float* o, int o_stride,
                 const NextKeys& next) {
  constexpr int PER = per_word(F), WORDS = RUN / PER;
  const int64_t slots = c.packed.pool.slots;
  const int64_t tile_low = low_words(F, slots) * TILE_BYTES, tile_top = top_words(slots) * TILE_BYTES;
  Sum<F> sums[H][N][PARTS] = {};
  for (int i = 0; i < c.n; i += RUN) {
    const char* page = c.page(i);
    Later later = i < next.n ? Later(c.packed, next.pages, next.at + i, true, WORDS) : Later();
    const char* low = page + c.side().codes + first * tile_low + low_words(F, c.slot(i)) * TILE_BYTES;
    const char* top = page + c.side().top + first * tile_top + c.slot(i) / 32 * TILE_BYTES;
#pragma GCC unroll 1
    for (int j = 0; j < WORDS; ++j) {
      const Weight* w = p.weights + i + j * PER;
      later.step();
Words words[N];
#pragma GCC unroll 4
      for (int t = 0; t < N; ++t) words[t] = load_words<F>(low + t * tile_low, top + t * tile_top, j);
#pragma GCC unroll UNROLL
      for (int k = 0; k < PER / 2; ++k) {
        Pair pairs[N];
#pragma GCC unroll 4
        for (int t = 0; t < N; ++t) pairs[t] = unpack<F>(words[t], j, k, table);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
          for (int t = 0; t < N; ++t) add_pair<F>(sums[h][t], pairs[t], w + h * CHUNK + 2 * k);
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
    for (int t = 0; t < N; ++t)
      for (int i = 0; i < PARTS; ++i) {
        float* to = o + h * o_stride + (first + t) * LANES + i * W;
        store(to, load(to) + to_floats<F>(sums[h][t][i], p.units[h]) + p.bias[h]);
      }
}

// Tiles [first, last) for H heads, as many at once as there are registers for.
template <int F, int H>
void value_heads(const ValueChunk& c, int first, int last, const FoldedProbabilities<H>& p, const Table& table, float* o,
                 int o_stride, NextKeys next) {
  for (; first + VALUE_TILES <= last; first += VALUE_TILES) value_tiles<F, H, VALUE_TILES>(c, first, p, table, o, o_stride, next), next = {};
  if (VALUE_TILES > 2 && first + 2 <= last) value_tiles<F, H, 2>(c, first, p, table, o, o_stride, next), first += 2, next = {};
  if (first < last) value_tiles<F, H, 1>(c, first, p, table, o, o_stride, next);
}

// Entries beside the codes of a page, of its slots first .. first + n.
inline void extra_values(const SideArgs& a, const char* page, int first, int n, const float* p, int p_stride, int heads,
                         float* o, int o_stride) {
  const uint16_t* where = reinterpret_cast<const uint16_t*>(page + a.extra);
  const f16* what = halves(page, a.extra + 2 * a.n_extra);
  for (int64_t i = 0; i < a.n_extra; ++i) {
    const int slot = (where[i] >> 8) - first, channel = where[i] & 255;
    if (slot < 0 || slot >= n) continue;
    const float x = load_part(what + i, 1)[0];
    for (int h = 0; h < heads; ++h) o[h * o_stride + channel] += x * p[h * p_stride + slot];
  }
}

}  // namespace mp
