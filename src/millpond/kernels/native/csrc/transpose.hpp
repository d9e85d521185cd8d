// Rows of 4-byte words to columns.
#pragma once

#include <algorithm>

#include "simd.hpp"

namespace mp {

#if defined(__AVX512F__)
// to[s * to_row + c] = from[c * from_row + s] for 16 words s of n <= 16 rows c; nothing else is written.
MP_INLINE void transpose_block(const uint32_t* from, int64_t from_row, int n, uint32_t* to, int64_t to_row) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + std::min(i, n - 1) * from_row);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xDD);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xDD);
  }
  const __mmask16 lanes = __mmask16((1u << n) - 1u);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm512_mask_storeu_epi32(to + i * to_row, lanes, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
    _mm512_mask_storeu_epi32(to + (i + 4) * to_row, lanes, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
    _mm512_mask_storeu_epi32(to + (i + 8) * to_row, lanes, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xDD));
    _mm512_mask_storeu_epi32(to + (i + 12) * to_row, lanes, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xDD));
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
