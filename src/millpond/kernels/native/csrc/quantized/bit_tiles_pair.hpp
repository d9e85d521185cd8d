// Tiles where the hardware multiplies pairs: of bf16, or of whole numbers of 16 bits for codes of 8 bits.
#pragma once

#include "quantized/bit_tiles.hpp"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
namespace mp {

using Weight = uint16_t;  // the bits of a bf16, or of a signed whole number
using Pair = __m512i;
constexpr int UNROLL = 16;      // of loops over the pairs of a word: keeps shifts constant
constexpr int VALUE_TILES = 4;  // of channels whose sums are held at once

// The numbers that the codes of a table format stand for: 2^b of them, exact in bf16; for e4m3 those without a sign.
struct Table {
  __m512i bits[4];
  template <int F>
  static Table of(const float* numbers) {
    Table t{};
    alignas(64) uint16_t bits[128] = {};
    for (int i = 0; i < 128; ++i) {
      if (is_table(F)) bits[i] = float_to_bf16(numbers[i % (1 << bits_of(F))]);  // so that the bits above do not matter
      if (F == FP8) bits[i] = float_to_bf16(e4m3_size(i));
    }
    for (int i = 0; (is_table(F) || F == FP8) && i < 4; ++i) t.bits[i] = _mm512_load_si512(bits + 32 * i);
    return t;
  }
};

// 16 words; `top`: where the third bits lie, for formats that have one.
struct Words {
  __m512i low, top;
};

// Words `j` of a run of tiles.
template <int F>
MP_INLINE Words load_words(const char* low, const char* top, int j) {
  Words w{_mm512_loadu_si512(low + size_t(j) * TILE_BYTES), __m512i{}};
  if (bits_of(F) == 3) w.top = _mm512_loadu_si512(top + size_t(j / 2) * TILE_BYTES);
  return w;
}

// The numbers of e4m3 codes in the low (k = 0) or high bytes of halves of a word.
MP_INLINE Pair from_e4m3(__m512i low, int k, const Table& table) {
  const __m512i size = k == 0 ? low : _mm512_srli_epi16(low, 8), sign = k == 0 ? _mm512_slli_epi16(low, 8) : low;
  const __m512i small = _mm512_permutex2var_epi16(table.bits[0], size, table.bits[1]);
  const __m512i large = _mm512_permutex2var_epi16(table.bits[2], size, table.bits[3]);
  const __mmask32 is_large = _mm512_test_epi16_mask(size, _mm512_set1_epi16(0x40));
  const __m512i bits = _mm512_mask_blend_epi16(is_large, small, large);
  return _mm512_ternarylogic_epi32(bits, sign, _mm512_set1_epi16(int16_t(0x8000)), 0xF8);  // bits | (sign & bit 15)
}

// Pair k of words j.
template <int F>
MP_INLINE Pair unpack(const Words& w, int j, int k, const Table& table) {
  constexpr int BITS = low_bits(F);
  if constexpr (F == INT8)
    return k == 0 ? _mm512_and_si512(w.low, _mm512_set1_epi16(0xFF)) : _mm512_srli_epi16(w.low, 8);
  if constexpr (F == FP8) return from_e4m3(w.low, k, table);
  const __m512i low = _mm512_srli_epi32(w.low, BITS * k);
  if constexpr (F == NUQ2 || F == NUQ4) return _mm512_permutexvar_epi16(low, table.bits[0]);
  constexpr uint32_t CODE = (1u << BITS) - 1, EXPONENT = F == NUQ3 ? 0 : 0x4300;
  __m512i code = _mm512_ternarylogic_epi32(low, _mm512_set1_epi32(int(CODE * 0x10001u)),
                                           _mm512_set1_epi32(int(EXPONENT * 0x10001u)), 0xEA);  // (low & CODE) | EXPONENT
  if constexpr (bits_of(F) == 3) {
    const int at = (j % 2) * 8 + k;  // of the third bit
    const __m512i top = at >= 2 ? _mm512_srli_epi32(w.top, unsigned(at - 2)) : _mm512_slli_epi32(w.top, unsigned(2 - at));
    code = _mm512_ternarylogic_epi32(code, top, _mm512_set1_epi32(0x00040004), 0xF8);  // code | (top & bit 2)
  }
  return F == NUQ3 ? _mm512_permutexvar_epi16(code, table.bits[0]) : code;
}

// sums += pair . (w[0], w[1])
template <int F>
MP_INLINE void add_pair(Sum<F> (&sums)[PARTS], const Pair& pair, const Weight* w) {
  int32_t both;
  std::memcpy(&both, w, 4);
  const __m512i weights = _mm512_set1_epi32(both);
  if constexpr (is_whole(F))
    sums[0] = (vi)_mm512_dpwssd_epi32((__m512i)sums[0], pair, weights);
  else
    sums[0] = (vf)_mm512_dpbf16_ps((__m512)sums[0], (__m512bh)pair, (__m512bh)weights);
}

// Store 2 * W weights, whole ones in units of 1 / `per_unit`. Returns `total` plus what they were rounded to, in floats
// or in units.
template <int F>
MP_INLINE vf put_weights(Weight* to, vf first, vf second, float per_unit, vf total) {
  if constexpr (is_whole(F)) {
    const __m512i a = _mm512_cvtps_epi32((__m512)(first * per_unit)), b = _mm512_cvtps_epi32((__m512)(second * per_unit));
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(a));
    _mm256_storeu_si256((__m256i*)(to + W), _mm512_cvtepi32_epi16(b));
    return total + to_float((vi)_mm512_add_epi32(a, b));
  } else {
    const __m512bh bits = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    _mm512_storeu_si512(to, (__m512i)bits);
    return (vf)_mm512_dpbf16_ps((__m512)total, bits, (__m512bh)_mm512_set1_epi16(0x3F80));
  }
}

}  // namespace mp
#endif
