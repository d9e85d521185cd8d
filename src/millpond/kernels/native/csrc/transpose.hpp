// Rows of 4-byte words to columns.
#pragma once

#include <algorithm>

#include "simd.hpp"

namespace mp {

#if defined(__AVX512F__)
// r[i]: 16 words of row i. After it r[c]: word c of all 16 rows.
MP_INLINE void turn(__m512i (&r)[16]) {
  __m512i s[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {  // quarter b of r[4 a + c]: word 4 b + c of rows 4 a .. 4 a + 3
    const __m512i even = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), odd = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    const __m512i later_even = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    const __m512i later_odd = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    s[c] = _mm512_shuffle_i32x4(even, later_even, 0x88);
    s[4 + c] = _mm512_shuffle_i32x4(odd, later_odd, 0x88);
    s[8 + c] = _mm512_shuffle_i32x4(even, later_even, 0xdd);
    s[12 + c] = _mm512_shuffle_i32x4(odd, later_odd, 0xdd);
  }
#pragma GCC unroll 16
  for (int c = 0; c < 16; ++c) r[c] = s[c];
}

// to[s * to_row + c] = from[c * from_row + s] for 16 words s of n <= 16 rows c; nothing else is written.
MP_INLINE void transpose_block(const uint32_t* from, int64_t from_row, int n, uint32_t* to, int64_t to_row) {
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(from + std::min(i, n - 1) * from_row);
  turn(r);
  const __mmask16 lanes = __mmask16((1u << n) - 1u);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_mask_storeu_epi32(to + i * to_row, lanes, r[i]);
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
