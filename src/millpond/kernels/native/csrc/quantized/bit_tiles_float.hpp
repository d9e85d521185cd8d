// Tiles where no pairs are multiplied: codes become floats.
#pragma once

#include "quantized/bit_tiles.hpp"

#if !(defined(__AVX512BF16__) && defined(__AVX512VNNI__))
namespace mp {

using Weight = float;
struct Pair {
  vf even[PARTS], odd[PARTS];
};
constexpr int UNROLL = 1;         // of loops over the pairs of a word: more only makes the code longer
constexpr int VALUE_TILES = 2;    // of channels whose sums are held at once

// The numbers that the codes of a table format stand for, 2^b of them, exact in bf16.
struct Table {
  float at[16];
  template <int F>
  static Table of(const float* numbers) {
    Table t{};
    for (int i = 0; is_table(F) && i < 1 << bits_of(F); ++i) t.at[i] = numbers[i];
    return t;
  }
};

// 16 words; `top`: where the third bits lie, for formats that have one.
struct Words {
  const uint32_t *low, *top;
};

// Words `j` of a run of tiles.
template <int F>
MP_INLINE Words load_words(const char* low, const char* top, int j) {
  return {reinterpret_cast<const uint32_t*>(low + size_t(j) * TILE_BYTES),
          reinterpret_cast<const uint32_t*>(bits_of(F) == 3 ? top + size_t(j / 2) * TILE_BYTES : low)};
}

MP_INLINE vf from_e4m3(vu byte) {
  const vu size = byte & 0x7Fu;
  const vf large = (vf)((size << 20) + (120u << 23));
  const vf tiny = to_float((vi)size) * 0x1p-9f;  // no leading one
  const vf x = select((vi)(size < 8u), tiny, large);
  return (vf)((vu)x | ((byte & 0x80u) << 24));
}

// The numbers of codes that lie in the low bits of each word, other bits ignored.
template <int F>
MP_INLINE vf number_of(vu code, const Table& table) {
  if constexpr (F == FP8) {
    return from_e4m3(code & 0xFFu);
  } else {
    code &= (1u << bits_of(F)) - 1;
    if constexpr (!is_table(F)) return to_float((vi)code);
    vf x;
    for (int i = 0; i < W; ++i) x[i] = table.at[code[i]];
    return x;
  }
}

// Pair k of words j.
template <int F>
MP_INLINE Pair unpack(const Words& w, int j, int k, const Table& table) {
  constexpr int BITS = low_bits(F);
  Pair pair;
  for (int i = 0; i < PARTS; ++i) {
    const vu low = (vu)load(reinterpret_cast<const int32_t*>(w.low) + i * W);
    vu even = low >> (BITS * k), odd = low >> (BITS * k + 16);
    if (bits_of(F) == 3) {
      const vu top = (vu)load(reinterpret_cast<const int32_t*>(w.top) + i * W);
      const int at = (j % 2) * 8 + k;  // of the third bit
      even = (even & 3u) | (((top >> at) & 1u) << 2);
      odd = (odd & 3u) | (((top >> (at + 16)) & 1u) << 2);
    }
    pair.even[i] = number_of<F>(even, table);
    pair.odd[i] = number_of<F>(odd, table);
  }
  return pair;
}

// sums += pair . (w[0], w[1])
template <int F>
MP_INLINE void add_pair(vf (&sums)[PARTS], const Pair& pair, const Weight* w) {
  for (int i = 0; i < PARTS; ++i) sums[i] += pair.even[i] * w[0] + pair.odd[i] * w[1];
}

// Store 2 * W weights. Returns `total` plus what they were rounded to.
template <int F>
MP_INLINE vf put_weights(Weight* to, vf first, vf second, float, vf total) {
  store(to, first);
  store(to + W, second);
  return total + first + second;
}

}  // namespace mp
#endif
