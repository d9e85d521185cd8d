// Sums of packed values weighted by probabilities. Lanes are channels, so that a tile row holds a few slots of 16 channels.
//
// Scales per slot are folded into the probabilities; what the zeros add is one number per head and group of channels.
#pragma once

#include "packed_keys.hpp"
#include "weigh.hpp"

namespace mp {

// The probabilities of a run as the values of one group of channels meet them.
struct Folds {
  Weight* weights;  // (group of heads, RUN)
  float* bias;      // (heads, groups, W): running sums of what is added to every channel of a group
};

// weights = p * scale; bias += p * zero - offset * weights. Slots from n on count nothing, whatever lies in them.
inline void fold_slots(const float* p, int p_stride, int n, const Factors& f, int first, float offset, int heads,
                       int bias_stride, const Folds& to) {
  for (int t = 0; t < RUN; t += W) {
    const vi used = iota() < n - t;
    const vf scale = select(used, f.get(f.scales, first + t, W), vf{});
    const vf zero = f.zeros != nullptr ? select(used, f.get(f.zeros, first + t, W), vf{}) : vf{};
    for (int h = 0; h < heads; ++h) {
      const vf weight = select(used, load(p + h * p_stride + t), vf{});
      const vf folded = put_weights(to.weights + h * RUN + t, weight * scale);
      float* bias = to.bias + h * bias_stride;
      store(bias, load(bias) + weight * zero - folded * (offset + f.half));
    }
  }
}

// o[h][channels of N tiles] += weights[h] . codes of 32 slots.
template <int F, int H, int N>
MP_INLINE void value_tiles(const char* low, const char* top, int64_t tile_low, int64_t tile_top, const Weight* w,
                           const Table& table, const char* ahead, float* o, int o_stride) {
  constexpr int PER = per_word(F), WORDS = RUN / PER;
  vf sums[H][N][PARTS];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 2
    for (int c = 0; c < N; ++c)
      for (int i = 0; i < PARTS; ++i) sums[h][c][i] = load(o + h * o_stride + c * LANES + i * W);
#pragma GCC unroll 1
  for (int j = 0; j < WORDS; ++j) {
    Words words[N];
#pragma GCC unroll 2
    for (int c = 0; c < N; ++c) {
      prefetch<TILE_BYTES>(ahead + c * tile_low + j * TILE_BYTES);
      words[c] = load_words<F>(low + c * tile_low, top + c * tile_top, j);
    }
#pragma GCC unroll UNROLL
    for (int k = 0; k < PER / 2; ++k) {
      Pair pair[N];
#pragma GCC unroll 2
      for (int c = 0; c < N; ++c) pair[c] = unpack<F>(words[c], j, k, table);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h)
#pragma GCC unroll 2
        for (int c = 0; c < N; ++c) add_pair(sums[h][c], pair[c], w + h * RUN + j * PER + 2 * k);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 2
    for (int c = 0; c < N; ++c)
      for (int i = 0; i < PARTS; ++i) store(o + h * o_stride + c * LANES + i * W, sums[h][c][i]);
}

// A run of 32 values of a page.
struct ValueRun {
  const char *low, *top, *ahead;
  int64_t tile_low, tile_top;  // bytes from the tiles of 16 channels to those of the next 16
};

template <int F>
inline ValueRun value_run(const PackedPool& p, const char* page, int slot, const char* later) {
  const SideArgs& a = p.a.value;
  const int64_t low = low_words(F, p.pool.slots) * TILE_BYTES, top = top_words(p.pool.slots) * TILE_BYTES;
  const int64_t at = low_words(F, slot) * TILE_BYTES, at_top = slot / 32 * TILE_BYTES;
  return {page + a.codes + at, page + a.top + at_top, later, low, top};
}

// Tiles [first, last) of a run for H heads.
template <int F, int H>
void value_heads(const ValueRun& run, int first, int last, const Weight* w, const Table& table, float* o, int o_stride) {
  int c = first;
  for (; c + 2 <= last; c += 2)
    value_tiles<F, H, 2>(run.low + c * run.tile_low, run.top + c * run.tile_top, run.tile_low, run.tile_top, w, table,
                         run.ahead + c * run.tile_low, o + c * LANES, o_stride);
  if (c < last)
    value_tiles<F, H, 1>(run.low + c * run.tile_low, run.top + c * run.tile_top, run.tile_low, run.tile_top, w, table,
                         run.ahead + c * run.tile_low, o + c * LANES, o_stride);
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
