// Codes of a few bits, in tiles: 16 lanes of 32-bit words, unpacked to pairs of numbers that meet pairs of weights.
//
// A word holds 32 / b codes of one lane: code 2k in bits b * k of its low half, code 2k + 1 in those of its high half.
// Where the hardware multiplies pairs of bf16, a pair is one vector of them; elsewhere it is two vectors of floats.
#pragma once

#include "convert.hpp"

namespace mp {

enum Format : int64_t { INT2 = 2, INT3 = 3, INT4 = 4, INT8 = 8, FP8 = 9, ROWS = 16, NUQ2 = 18, NUQ3 = 19, NUQ4 = 20 };

constexpr int LANES = 16;            // of a tile
constexpr int TILE_BYTES = 4 * LANES;
constexpr int PARTS = LANES / W;     // vectors per tile

constexpr bool is_table(int f) { return f >= NUQ2; }
constexpr int bits_of(int f) { return f == FP8 ? 8 : is_table(f) ? f - 16 : f; }
// Bits of a code in the first words; three bits are two there and one in words of their own.
constexpr int low_bits(int f) { return bits_of(f) == 3 ? 2 : bits_of(f); }
constexpr int per_word(int f) { return 32 / low_bits(f); }

#if defined(__AVX512BF16__)
constexpr bool PAIRED = true;
using Weight = uint16_t;  // the bits of a bf16
using Pair = __m512i;
#else
constexpr bool PAIRED = false;
using Weight = float;
struct Pair {
  vf even[PARTS], odd[PARTS];
};
#endif

// Of loops over the pairs of a word: where that keeps shifts constant, not where it only makes code longer.
constexpr int UNROLL = PAIRED ? 16 : 1;

// A code c of few bits is unpacked as OFFSET + c: in bf16, 128 + c is c put into the mantissa of 128.
constexpr float offset_of(int f) { return PAIRED && bits_of(f) <= 4 && !is_table(f) ? 128.0f : 0.0f; }

// The numbers that the codes of a table format stand for, 2^b of them, exact in bf16.
struct Table {
  float at[16];
#if defined(__AVX512BF16__)
  __m512i repeated;  // so that the bits above a code do not matter
#endif
  template <int F>
  static Table of(const float* numbers) {
    Table t{};
    if (!is_table(F)) return t;
    constexpr int n = 1 << bits_of(F);
    for (int i = 0; i < n; ++i) t.at[i] = numbers[i];
#if defined(__AVX512BF16__)
    alignas(64) uint16_t bits[32];
    for (int i = 0; i < 32; ++i) bits[i] = float_to_bf16(numbers[i % n]);
    t.repeated = _mm512_load_si512(bits);
#endif
    return t;
  }
};

// 16 words; `top`: where the third bits lie, for formats that have one.
struct Words {
#if defined(__AVX512BF16__)
  __m512i low, top;
#else
  const uint32_t *low, *top;
#endif
};

// Words `j` of a run of tiles.
template <int F>
MP_INLINE Words load_words(const char* low, const char* top, int j) {
#if defined(__AVX512BF16__)
  Words w{_mm512_loadu_si512(low + size_t(j) * TILE_BYTES), __m512i{}};
  if (bits_of(F) == 3) w.top = _mm512_loadu_si512(top + size_t(j / 2) * TILE_BYTES);
  return w;
#else
  return {reinterpret_cast<const uint32_t*>(low + size_t(j) * TILE_BYTES),
          reinterpret_cast<const uint32_t*>(bits_of(F) == 3 ? top + size_t(j / 2) * TILE_BYTES : low)};
#endif
}

#if defined(__AVX512BF16__)

// Floats that bf16 holds exactly, as pairs.
MP_INLINE Pair zip_exact(__m512 even, __m512 odd) {
  const __m512i high = _mm512_set1_epi32(int(0xFFFF0000u));
  return _mm512_ternarylogic_epi32(_mm512_castps_si512(odd), high, _mm512_srli_epi32(_mm512_castps_si512(even), 16),
                                   0xEA);  // (odd & high) | even
}

// The float of an e4m3 code (no NaN) in the low byte of each word.
MP_INLINE __m512 from_e4m3(__m512i byte) {
  const __m512i size = _mm512_and_si512(byte, _mm512_set1_epi32(0x7F));
  const __m512i wide = _mm512_add_epi32(_mm512_slli_epi32(size, 20), _mm512_set1_epi32(120 << 23));
  const __mmask16 tiny = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(8));  // no leading one: m * 2^-9
  __m512 x = _mm512_castsi512_ps(wide);
  x = _mm512_mask_mul_ps(x, tiny, _mm512_cvtepi32_ps(size), _mm512_set1_ps(0x1p-9f));
  const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(byte, _mm512_set1_epi32(0x80)), 24);
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x), sign));
}

// Pair k of words j.
template <int F>
MP_INLINE Pair unpack(const Words& w, int j, int k, const Table& table) {
  constexpr int BITS = low_bits(F);
  const __m512i low = _mm512_srli_epi32(w.low, BITS * k);
  if constexpr (F == INT8) {
    const __m512i byte = _mm512_set1_epi32(0xFF);
    return zip_exact(_mm512_cvtepi32_ps(_mm512_and_si512(low, byte)),
                     _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(w.low, BITS * k + 16), byte)));
  } else if constexpr (F == FP8) {
    return zip_exact(from_e4m3(low), from_e4m3(_mm512_srli_epi32(w.low, BITS * k + 16)));
  } else if constexpr (F == NUQ2 || F == NUQ4) {
    return _mm512_permutexvar_epi16(low, table.repeated);
  } else {
    constexpr uint32_t CODE = (1u << BITS) - 1, EXPONENT = F == NUQ3 ? 0 : 0x4300;
    __m512i code = _mm512_ternarylogic_epi32(low, _mm512_set1_epi32(int(CODE * 0x10001u)),
                                             _mm512_set1_epi32(int(EXPONENT * 0x10001u)), 0xEA);  // (low & CODE) | EXPONENT
    if constexpr (BITS == 2 && bits_of(F) == 3) {
      const int at = (j % 2) * 8 + k;  // of the third bit
      const __m512i top = at >= 2 ? _mm512_srli_epi32(w.top, unsigned(at - 2)) : _mm512_slli_epi32(w.top, unsigned(2 - at));
      code = _mm512_ternarylogic_epi32(code, top, _mm512_set1_epi32(0x00040004), 0xF8);  // code | (top & bit 2)
    }
    return F == NUQ3 ? _mm512_permutexvar_epi16(code, table.repeated) : code;
  }
}

// sums += pair . (w[0], w[1])
MP_INLINE void add_pair(vf (&sums)[PARTS], const Pair& pair, const Weight* w) {
  int32_t both;
  std::memcpy(&both, w, 4);
  sums[0] = (vf)_mm512_dpbf16_ps((__m512)sums[0], (__m512bh)pair, (__m512bh)_mm512_set1_epi32(both));
}

// Round to weights, and what they were rounded to.
MP_INLINE vf put_weights(Weight* to, vf x) {
  const __m256bh bits = _mm512_cvtneps_pbh((__m512)x);
  _mm256_storeu_si256((__m256i*)to, (__m256i)bits);
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
}

#else

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

MP_INLINE void add_pair(vf (&sums)[PARTS], const Pair& pair, const Weight* w) {
  for (int i = 0; i < PARTS; ++i) sums[i] += pair.even[i] * w[0] + pair.odd[i] * w[1];
}

MP_INLINE vf put_weights(Weight* to, vf x) {
  store(to, x);
  return x;
}

#endif

// Call f with the format as a compile-time constant. `ROWS` is not among them: rows are no codes.
template <class F>
void with_format(int64_t format, F&& f) {
  switch (format) {
    case INT2: return f(std::integral_constant<int, INT2>{});
    case INT3: return f(std::integral_constant<int, INT3>{});
    case INT4: return f(std::integral_constant<int, INT4>{});
    case INT8: return f(std::integral_constant<int, INT8>{});
    case FP8: return f(std::integral_constant<int, FP8>{});
    case NUQ2: return f(std::integral_constant<int, NUQ2>{});
    case NUQ3: return f(std::integral_constant<int, NUQ3>{});
    default: return f(std::integral_constant<int, NUQ4>{});
  }
}

}  // namespace mp
