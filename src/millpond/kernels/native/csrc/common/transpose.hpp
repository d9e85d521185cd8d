// Rows of 4-byte words to columns.
#pragma once

#include <algorithm>

#include "common/simd.hpp"

namespace mp {

#if defined(__AVX512F__)
// The two halves of a transposition of 16 rows of 16 words. First four neighbouring rows: word 4 b + c of all four becomes
// quarter b of to[c].
MP_INLINE void turn_rows_of_four(const __m512i (&r)[4], __m512i* to) {
  const __m512i low = _mm512_unpacklo_epi32(r[0], r[1]), high = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i later_low = _mm512_unpacklo_epi32(r[2], r[3]), later_high = _mm512_unpackhi_epi32(r[2], r[3]);
  to[0] = _mm512_unpacklo_epi64(low, later_low);
  to[1] = _mm512_unpackhi_epi64(low, later_low);
  to[2] = _mm512_unpacklo_epi64(high, later_high);
  to[3] = _mm512_unpackhi_epi64(high, later_high);
}

// Then vector c of each four rows: to[4 b + c] is word 4 b + c of all 16 rows.
MP_INLINE void turn_quarters(const __m512i* fours, int c, __m512i* to) {
  const __m512i first = fours[c], second = fours[4 + c], third = fours[8 + c], fourth = fours[12 + c];
  const __m512i even = _mm512_shuffle_i32x4(first, second, 0x88), odd = _mm512_shuffle_i32x4(first, second, 0xdd);
  const __m512i later_even = _mm512_shuffle_i32x4(third, fourth, 0x88);
  const __m512i later_odd = _mm512_shuffle_i32x4(third, fourth, 0xdd);
  to[c] = _mm512_shuffle_i32x4(even, later_even, 0x88);
  to[4 + c] = _mm512_shuffle_i32x4(odd, later_odd, 0x88);
  to[8 + c] = _mm512_shuffle_i32x4(even, later_even, 0xdd);
  to[12 + c] = _mm512_shuffle_i32x4(odd, later_odd, 0xdd);
}

// r[i]: 16 words of row i. After it r[c]: word c of all 16 rows.
MP_INLINE void turn(__m512i (&r)[16]) {
  __m512i fours[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512i rows[4] = {r[i], r[i + 1], r[i + 2], r[i + 3]};
    turn_rows_of_four(rows, fours + i);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) turn_quarters(fours, c, r);
}

// 16 words of each of n <= 16 rows; a row behind the last one is the last one.
MP_INLINE void load_turned(const uint32_t* from, int64_t from_row, int n, __m512i (&r)[16]) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + std::min(i, n - 1) * from_row);
  turn(r);
}

// The floats of pairs of bf16: the first of each pair, the second.
MP_INLINE vf first_floats(__m512i pairs) { return (vf)_mm512_slli_epi32(pairs, 16); }
MP_INLINE vf second_floats(__m512i pairs) { return (vf)_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))); }

// to[s * to_row + c] = from[c * from_row + s] for 16 words s of n <= 16 rows c; nothing else is written.
MP_INLINE void transpose_block(const uint32_t* from, int64_t from_row, int n, uint32_t* to, int64_t to_row) {
  __m512i r[16];
  load_turned(from, from_row, n, r);
  const __mmask16 lanes = __mmask16((1u << n) - 1u);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_mask_storeu_epi32(to + i * to_row, lanes, r[i]);
}

// The same for the 32 numbers of 16 pairs of bf16, as floats.
MP_INLINE void transpose_floats(const uint32_t* from, int64_t from_row, int n, float* to, int64_t to_row) {
  __m512i r[16];
  load_turned(from, from_row, n, r);
  const __mmask16 lanes = __mmask16((1u << n) - 1u);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    _mm512_mask_storeu_ps(to + 2 * i * to_row, lanes, (__m512)first_floats(r[i]));
    _mm512_mask_storeu_ps(to + (2 * i + 1) * to_row, lanes, (__m512)second_floats(r[i]));
  }
}
#elif defined(__AVX2__)
// r[i]: 8 words of row i. After it r[c]: word c of all 8 rows.
MP_INLINE void turn(__m256 (&r)[8]) {
  __m256 pairs[8], fours[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x20);
    r[4 + i] = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x31);
  }
}

// As floats, the 16 numbers of 8 pairs of bf16 of each of n <= 8 rows: to[s * to_row + c] is number s of row c. All of
// the first min(8, to_row) columns are written; one behind the last row is the last row.
MP_INLINE void transpose_floats(const uint32_t* from, int64_t from_row, int n, float* to, int64_t to_row) {
  __m256 r[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + std::min(i, n - 1) * from_row));
  turn(r);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const vu pairs = (vu)r[i];
    store(to + 2 * i * to_row, (vf)(pairs << 16));  // of a narrow column the rest is written over by the next
    const vf second = (vf)(pairs & 0xffff0000u);
    float* last = to + (2 * i + 1) * to_row;
    if (i < 7 || to_row >= 8)
      store(last, second);
    else
      store_part(last, second, int(to_row));
  }
}
#endif

// Words of n rows, `steps` of each behind each other, to steps x n columns.
inline void transpose(const void* rows, void* to, int n, int steps) {
  const uint32_t* from = static_cast<const uint32_t*>(rows);
  uint32_t* out = static_cast<uint32_t*>(to);
  int s = 0;
#if defined(__AVX512F__)
  for (; s + 16 <= steps; s += 16)
    for (int c = 0; c < n; c += 16)
      transpose_block(from + int64_t(c) * steps + s, steps, std::min(16, n - c), out + s * n + c, n);
#endif
  for (; s < steps; ++s)
    for (int c = 0; c < n; ++c) out[s * n + c] = from[c * steps + s];
}

}  // namespace mp
