// Codes into the tiles of a page: see quantized/bit_tiles.hpp for the order of the bits.
#pragma once

#include "quantized/encode.hpp"

namespace mp {

// Where code number `depth` of a lane lies: word, and bit in it.
struct Place {
  int word, bit;
};
template <int BITS>
constexpr Place place(int depth) {
  const int e = depth % (32 / BITS);
  return {depth / (32 / BITS), BITS * (e / 2) + 16 * (e % 2)};
}

// The low bits of 32 / BITS neighbouring codes as one word.
template <int BITS>
inline uint32_t word_of(const uint8_t* codes) {
  uint32_t even = 0, odd = 0;
#if defined(__BMI2__)
  const uint64_t mask = 0x0001000100010001u * ((1u << BITS) - 1);
  for (int i = 0, at = 0; i < 32 / BITS; i += 8, at += 4 * BITS) {
    uint64_t eight = 0;
    std::memcpy(&eight, codes + i, BITS == 8 ? 4 : 8);
    even |= uint32_t(_pext_u64(eight, mask)) << at;
    odd |= uint32_t(_pext_u64(eight, mask << 8)) << at;
  }
#else
  for (int i = 32 / BITS; i > 0; i -= 2) {
    even = even << BITS | (codes[i - 2] & ((1u << BITS) - 1));
    odd = odd << BITS | (codes[i - 1] & ((1u << BITS) - 1));
  }
#endif
  return even | odd << 16;
}

template <int F>
void lay_keys(const SideArgs& a, const Sheet& s, int first, char* page) {
  constexpr int per = per_word(F);
  const int words = int(low_words(F, s.dim)), top = int(top_words(s.dim));
  for (int t = 0; t < s.n; ++t) {
    const int tile = (first + t) / LANES, lane = (first + t) % LANES;
    uint32_t* low = reinterpret_cast<uint32_t*>(page + a.codes) + tile * words * LANES + lane;
    const uint8_t* codes = s.codes + int64_t(t) * s.dim;
    for (int w = 0; w < words; ++w, codes += per) low[w * LANES] = word_of<low_bits(F)>(codes);
    if (bits_of(F) != 3) continue;
    uint32_t* third = reinterpret_cast<uint32_t*>(page + a.top) + tile * top * LANES + lane;
    for (int d = 0; d < s.dim; ++d) {
      const Place p = place<1>(d);
      if (d % 32 == 0) third[p.word * LANES] = 0;
      third[p.word * LANES] |= uint32_t(s.codes[int64_t(t) * s.dim + d] >> 2) << p.bit;
    }
  }
}

// BITS bits of codes >> `drop` of slots first .. first + n, 16 channels wide. `words`: of the page's tile.
template <int BITS>
inline void lay_lanes(uint32_t* words, const uint8_t* codes, int stride, int first, int n, int drop) {
  constexpr int per = 32 / BITS;
  constexpr uint32_t mask = (1u << BITS) - 1;
  for (int t = 0; t < n;) {
    const int in_word = (first + t) % per, run = std::min(n - t, per - in_word);
    uint32_t* word = words + (first + t) / per * LANES;
    uint32_t sum[LANES] = {}, kept = 0;  // kept: the bits of slots that are not written
    if (run < per) {
      kept = ~0u;
      for (int e = in_word; e < in_word + run; ++e) kept &= ~(mask << place<BITS>(e).bit);
    }
    for (int e = 0; e < run; ++e, ++t) {
      const int bit = place<BITS>(in_word + e).bit;
      const uint8_t* from = codes + int64_t(t) * stride;
      for (int i = 0; i < LANES; ++i) sum[i] |= (uint32_t(from[i]) >> drop & mask) << bit;
    }
    for (int i = 0; i < LANES; ++i) word[i] = (word[i] & kept) | sum[i];
  }
}

template <int F>
void lay_values(const SideArgs& a, const Sheet& s, int first, int slots, char* page) {
  for (int c = 0; c < s.dim / LANES; ++c) {
    const uint8_t* codes = s.codes + c * LANES;
    uint32_t* low = reinterpret_cast<uint32_t*>(page + a.codes) + c * low_words(F, slots) * LANES;
    lay_lanes<low_bits(F)>(low, codes, s.dim, first, s.n, 0);
    if (bits_of(F) != 3) continue;
    lay_lanes<1>(reinterpret_cast<uint32_t*>(page + a.top) + c * top_words(slots) * LANES, codes, s.dim, first, s.n, 2);
  }
}

}  // namespace mp
