// Keys before RoPE: 32 at a time become numbers, are turned to their positions, and meet the queries.
//
// Where 32 slots hold neighbouring positions p .. p + 31, which is what a text leaves, the queries are turned back by p
// and the keys by 0 .. 31, whose cosines lie in one small table. Elsewhere the cosines are collected slot by slot.
#include "quantized/pre_rope_keys.hpp"

#include "quantized/packed_keys.hpp"

namespace mp {
namespace {

// A pair of neighbours of 16 lanes as numbers.
struct Numbers {
  vf even[PARTS], odd[PARTS];
};

template <int F>
MP_INLINE Numbers numbers(const Pair& pair) {
  Numbers n;
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
  if constexpr (is_whole(F)) {
    n.even[0] = to_float((vi)_mm512_and_si512(pair, _mm512_set1_epi32(0xFFFF)));
    n.odd[0] = to_float((vi)_mm512_srli_epi32(pair, 16));
    return n;
  }
  n.even[0] = (vf)_mm512_slli_epi32(pair, 16);
  n.odd[0] = (vf)_mm512_and_si512(pair, _mm512_set1_epi32(int(0xFFFF0000u)));
#else
  for (int i = 0; i < PARTS; ++i) n.even[i] = pair.even[i], n.odd[i] = pair.odd[i];
#endif
  return n;
}

// 32 keys as numbers, to (dim, RUN): scale * code + zero.
template <int F>
void decode_run(const KeyRun& run, Later later, const float* scales, const float* zeros, const Table& table, float* to) {
  constexpr int PER = per_word(F);
  constexpr float OFFSET = offset_of(F);
  for (int j = 0; j < run.words; ++j) {
    later.step();
    for (int t = 0; t < 2; ++t) {
      const Words words = load_words<F>(run.low + t * run.tile_low, run.top + t * run.tile_top, j);
#pragma GCC unroll UNROLL
      for (int k = 0; k < PER / 2; ++k) {
        const int d = j * PER + 2 * k;
        const Numbers x = numbers<F>(unpack<F>(words, j, k, table));
        for (int i = 0; i < PARTS; ++i) {
          float* row = to + d * RUN + t * LANES + i * W;
          store(row, (x.even[i] - OFFSET) * scales[d] + zeros[d]);
          store(row + RUN, (x.odd[i] - OFFSET) * scales[d + 1] + zeros[d + 1]);
        }
      }
    }
  }
}

// The scales and zeros of the channels of the group that holds slot `slot` of a page, (dim,) floats each.
template <int F>
void load_factors(const SideArgs& a, const char* page, int slot, int dim, float* scales, float* zeros) {
  const char* first = page + a.scales + (F == FP8 ? 0 : slot / a.group * dim * 2);
  const char* zero = a.zeros >= 0 ? page + a.zeros + slot / a.group * dim * 2 : nullptr;
  const Factors f{first, zero, F == FP8, F == FP8, half_of(a)};
  for (int d = 0; d < dim; d += W) {
    const vf scale = f.get(f.scales, d, dim - d);
    store(scales + d, scale);
    store(zeros + d, zero != nullptr ? f.get(f.zeros, d, dim - d) : scale * -f.half);
  }
}

// What lies beside the codes of slots first .. first + RUN of a page.
void add_extra(const SideArgs& a, const char* page, int first, float* to) {
  const uint16_t* where = reinterpret_cast<const uint16_t*>(page + a.extra);
  const f16* what = halves(page, a.extra + 2 * a.n_extra);
  for (int64_t i = 0; i < a.n_extra; ++i) {
    const int slot = (where[i] >> 8) - first, channel = where[i] & 255;
    if (slot >= 0 && slot < RUN) to[channel * RUN + slot] += load_part(what + i, 1)[0];
  }
}

// The cosines and sines of a run, both (n_pairs, RUN), and the queries (group, stride) that meet keys turned by them.
struct Turn {
  const float *cos, *sin, *query;
};

// The position of a slot as a row of the tables; of one that holds nothing, or was never written, any.
MP_INLINE int64_t row_of(const RopeArgs& a, int32_t position) {
  return uint32_t(position) < uint64_t(a.n_positions) ? position : 0;
}

// The query of heads as seen from position p: turned back by it, and scaled as the keys would be.
void turn_back(const RopeArgs& a, int64_t p, const float* query, int group, int stride, float* to) {
  std::memcpy(to, query, size_t(group) * size_t(stride) * 4);
  const float *cos = a.cos + p * a.n_pairs, *sin = a.sin + p * a.n_pairs;
  for (int h = 0; h < group; ++h, query += stride, to += stride)
    for (int64_t i = 0; i < a.n_pairs; ++i) {
      const int x = a.pairs[2 * i], y = a.pairs[2 * i + 1];
      to[x] = query[x] * cos[i] + query[y] * sin[i];
      to[y] = query[y] * cos[i] - query[x] * sin[i];
    }
}

Turn turn_of(const RopeArgs& a, const int32_t* position, const float* query, int group, int stride, float* room) {
  bool neighbours = position[0] >= 0 && row_of(a, position[0]) == position[0];
  for (int i = 1; i < RUN; ++i) neighbours &= position[i] == position[0] + i;
  if (neighbours) {
    turn_back(a, position[0], query, group, stride, room);
    return {a.near_cos, a.near_sin, room};
  }
  float *cos = room, *sin = room + a.n_pairs * RUN;
  for (int s = 0; s < RUN; ++s) {
    const int64_t row = row_of(a, position[s]) * a.n_pairs;
    for (int64_t i = 0; i < a.n_pairs; ++i) cos[i * RUN + s] = a.cos[row + i], sin[i * RUN + s] = a.sin[row + i];
  }
  return {cos, sin, query};
}

// Turn keys (dim, RUN) in place.
void turn_keys(const RopeArgs& a, const Turn& turn, float* keys) {
  for (int64_t p = 0; p < a.n_pairs; ++p) {
    float *x = keys + a.pairs[2 * p] * RUN, *y = keys + a.pairs[2 * p + 1] * RUN;
    for (int i = 0; i < RUN; i += W) {
      const vf cos = load(turn.cos + p * RUN + i), sin = load(turn.sin + p * RUN + i);
      const vf first = load(x + i), second = load(y + i);
      store(x + i, first * cos - second * sin);
      store(y + i, second * cos + first * sin);
    }
  }
}

// Logits (H, RUN) of keys (dim, RUN).
template <int H>
void dot_keys(const float* keys, int dim, const float* query, int stride, float* s) {
  constexpr int N = RUN / W;
  vf sums[H][N] = {};
  for (int d = 0; d < dim; ++d, keys += RUN) {
    vf key[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) key[i] = load(keys + i * W);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) sums[h][i] += key[i] * query[h * stride + d];
  }
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < N; ++i) store(s + h * CHUNK + i * W, sums[h][i]);
}

template <int F>
void logits(const Call& c, int r, const Part& part, int at, int n, const Scratch& scratch, float* weights) {
  const PackedPool packed(*c.packed);
  const SideArgs& a = c.packed->key;
  const RopeArgs& rope = c.packed->rope;
  const int dim = int(packed.pool.key_dim), slots = int(packed.pool.slots), stride = int(round_up(dim, QUERY_PAD));
  const Table table = Table::of<F>(a.table);
  const int64_t row = int64_t(c.head(r)) * dim;
  float* keys = scratch.turned;
  float* own_scales = keys + dim * RUN;  // of the page, where none are fixed
  float* own_zeros = own_scales + stride;
  float* room = own_zeros + stride;
  const bool fixed = a.fixed_scales != nullptr;
  const float* scales = fixed ? a.fixed_scales + row : own_scales;
  const float* zeros = fixed ? a.fixed_zeros + row : own_zeros;
  for (int i = 0; i < n; i += RUN) {
    const int slot = (at + i) & (slots - 1);
    const char* page = packed.page(part.pages, at + i);
    const KeyRun run = key_run<F>(packed, page, slot);
    const Later later(packed, part.pages, at + i, false, run.words);
    if (!fixed && (i == 0 || (at + i) % a.group == 0)) load_factors<F>(a, page, slot, dim, own_scales, own_zeros);
    decode_run<F>(run, later, scales, zeros, table, keys);
    if (a.n_extra > 0) add_extra(a, page, slot, keys);
    const Turn turn = turn_of(rope, packed.pool.position(part.pages, at + i), scratch.packed_query, c.group, stride, room);
    turn_keys(rope, turn, keys);
    const auto go = [&](auto heads, int h) {
      dot_keys<heads>(keys, dim, turn.query + h * stride, stride, weights + h * CHUNK + i);
    };
    for_heads(c.group, go);
  }
}

}  // namespace

void turned_logits(const Call& c, int r, const Part& part, int at, int n, const Scratch& scratch, float* weights) {
  with_format(c.packed->key.format, [&](auto f) { logits<f>(c, r, part, at, n, scratch, weights); });
}

}  // namespace mp
