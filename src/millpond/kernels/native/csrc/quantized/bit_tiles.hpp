// Codes of a few bits, in tiles: 16 lanes of 32-bit words, unpacked to pairs of numbers that meet pairs of weights.
//
// A word holds 32 / b codes of one lane: code 2k in bits b * k of its low half, code 2k + 1 in those of its high half.
// Where the hardware multiplies pairs of 16 bits, a pair is one vector of them; elsewhere it is two vectors of floats.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/convert.hpp"
#include "quantized/packed_args.hpp"

namespace mp {

constexpr int LANES = 16;            // of a tile
constexpr int TILE_BYTES = 4 * LANES;
constexpr int PARTS = LANES / W;     // vectors per tile

constexpr bool is_table(int f) { return f >= NUQ2; }
constexpr int bits_of(int f) { return f == FP8 ? 8 : is_table(f) ? f - 16 : f; }
// Bits of a code in the first words; three bits are two there and one in words of their own.
constexpr int low_bits(int f) { return bits_of(f) == 3 ? 2 : bits_of(f); }
constexpr int per_word(int f) { return 32 / low_bits(f); }

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
constexpr bool PAIRED = true;
#else
constexpr bool PAIRED = false;
#endif

// Whether codes and weights meet as whole numbers of 16 bits: bf16 has too few for every code.
constexpr bool is_whole(int f) { return PAIRED && f == INT8; }
// What sums of products are gathered in: whole numbers come in `unit`s, see to_floats.
template <int F>
using Sum = std::conditional_t<is_whole(F), vi, vf>;
// The largest weight of which the products with `n` codes add up in 32 bits.
constexpr float largest_weight(int64_t n) { return float(std::min<int64_t>(INT16_MAX, INT32_MAX / (255 * n))); }

// A code c of few bits is unpacked as OFFSET + c: in bf16, 128 + c is c put into the mantissa of 128.
constexpr float offset_of(int f) { return PAIRED && bits_of(f) <= 4 && !is_table(f) ? 128.0f : 0.0f; }

// The float of an e4m3 code without its sign. NaN, which is never stored, would be 480.
inline float e4m3_size(int code) {
  return code < 8 ? float(code) * 0x1p-9f : float(8 + code % 8) * float(1 << (code / 8)) * 0x1p-10f;
}

}  // namespace mp

#include "quantized/bit_tiles_float.hpp"
#include "quantized/bit_tiles_pair.hpp"

namespace mp {

// Sums as floats.
template <int F>
MP_INLINE vf to_floats(Sum<F> sums, float unit) {
  if constexpr (is_whole(F))
    return to_float(sums) * unit;
  else
    return sums;
}

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
