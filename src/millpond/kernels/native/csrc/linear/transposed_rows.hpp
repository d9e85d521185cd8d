// Rows of a matrix of bf16, turned so that a lane holds a row: what both ways to multiply a few rows with it share.
#pragma once

#include <algorithm>

#include "common/simd.hpp"
#include "common/transpose.hpp"

namespace mp {

constexpr int64_t AHEAD = 16 * 1024;  // bytes of w between the request for them and their use, at least

#if defined(__AVX512F__)
constexpr int TURNED = 16;  // rows of w that are turned together
constexpr int STRIDE = 32;  // numbers of a row of w that are taken at once

// Ask for LINES lines that are used a tile later: into the L2 cache, since a tile may be larger than the first.
template <int LINES>
MP_INLINE void prefetch_lines(const char* p) {
#pragma GCC unroll 16
  for (int i = 0; i < LINES; ++i) __builtin_prefetch(p + 64 * i, 0, 2);
}

// The next STRIDE numbers of rows `first` .. first + 3, `row` numbers apart, turned to fours[first ..]; zeros where fewer than
// STRIDE are `left`.
MP_INLINE void turn_four(const bf16* w, int64_t row, int left, int first, __m512i* fours) {
  const __mmask32 there = left >= STRIDE ? ~0u : (1u << left) - 1u;
  __m512i r[4];
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) r[t] = _mm512_maskz_loadu_epi16(there, w + (first + t) * row);
  turn_rows_of_four(r, fours + first);
}

// r[p]: pair p of the next STRIDE numbers of 16 rows.
MP_INLINE void turn_rows(const bf16* w, int64_t row, int left, __m512i (&r)[TURNED]) {
  __m512i fours[TURNED];
#pragma GCC unroll 4
  for (int i = 0; i < TURNED; i += 4) turn_four(w, row, left, i, fours);
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) turn_quarters(fours, c, r);
}
#endif

}  // namespace mp
