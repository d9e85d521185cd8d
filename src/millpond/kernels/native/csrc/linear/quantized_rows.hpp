// A few rows of floats times rows of a matrix of codes.
//
// A row of k numbers is k / GROUP groups. A number is step * code + least, with a step and a least number of each group in
// f16. 4 bits: codes 0 .. 15, of a group 16 bytes, number i in the low half of byte i and number 16 + i in its high half.
// 8 bits: codes -128 .. 127, a byte each, and least is 0 and is not stored. Scales: (n, kinds, groups), steps before leasts.
//
// x . w is summed as the sum over groups of step * (x . codes) + least * sum(x): each code becomes a float once, for all
// rows of x, and each sum is made in one order whatever the other rows are.
#pragma once

#include <algorithm>

#include "common/args.hpp"
#include "common/convert.hpp"
#include "common/prefetch.hpp"
#include "common/threads.hpp"

namespace mp {

constexpr int GROUP = 32;            // numbers that share their scales
constexpr int PARTS_OF_GROUP = GROUP / W;
constexpr int ROWS_TOGETHER = 4;     // of x, whose sums stay in registers
constexpr int CODES_AHEAD = 1024;    // bytes of codes that are asked for before they are needed

constexpr int kinds(int bits) { return bits == 4 ? 2 : 1; }

// Bytes PART * W .. of 16 bytes as W floats; BITS 8: as signed numbers.
typedef uint8_t Bytes __attribute__((vector_size(16)));

template <int BITS, int PART>
MP_INLINE vf floats_of(Bytes bytes) {
#if defined(__AVX512F__)
  const __m128i b = (__m128i)bytes;
  return to_float((vi)(BITS == 4 ? _mm512_cvtepu8_epi32(b) : _mm512_cvtepi8_epi32(b)));
#elif defined(__AVX2__)
  const __m128i b = _mm_srli_si128((__m128i)bytes, PART * W);
  return to_float((vi)(BITS == 4 ? _mm256_cvtepu8_epi32(b) : _mm256_cvtepi8_epi32(b)));
#else
  vi v;
  for (int i = 0; i < W; ++i) v[i] = BITS == 4 ? int32_t(bytes[PART * W + i]) : int32_t(int8_t(bytes[PART * W + i]));
  return to_float(v);
#endif
}

// 16 bytes as 16 / W vectors.
template <int BITS, int PART = 0>
MP_INLINE void spread(Bytes bytes, vf* to) {
  if constexpr (PART * W < 16) {
    to[PART] = floats_of<BITS, PART>(bytes);
    spread<BITS, PART + 1>(bytes, to);
  }
}

template <int BITS>
struct QuantizedRow {
  static constexpr int BYTES = GROUP * BITS / 8;  // of a group
  const uint8_t* codes;
  const f16 *steps, *leasts;
  int groups;

  QuantizedRow(const void* w, const void* scales, int64_t row, int dim) : groups(dim / GROUP) {
    codes = static_cast<const uint8_t*>(w) + row * groups * BYTES;
    steps = static_cast<const f16*>(scales) + row * groups * kinds(BITS);
    leasts = steps + groups;
  }

  // The codes of group g.
  MP_INLINE void group(int g, vf (&to)[PARTS_OF_GROUP]) const {
    const uint8_t* from = codes + int64_t(g) * BYTES;
    Bytes first, second;
    std::memcpy(&first, from, 16);
    if constexpr (BITS == 8) {
      std::memcpy(&second, from + 16, 16);
    } else {
      second = first >> 4;
      first &= 15;
    }
    spread<BITS>(first, to);
    spread<BITS>(second, to + 16 / W);
  }

  // `n` <= W numbers of scales as floats.
  static MP_INLINE vf scales_of(const f16* from, int n) { return n >= W ? load(from) : load_part(from, n); }
};

// The sum of each group of each row of x (m, dim), to (m, dim / GROUP + W), padded with zeros.
inline void sum_groups(const float* x, int m, int dim, float* to) {
  const int groups = dim / GROUP;
  for (int h = 0; h < m; ++h, x += dim, to += groups + W) {
    for (int g = 0; g < groups; ++g) {
      vf total{};
      for (int i = 0; i < PARTS_OF_GROUP; ++i) total += load(x + g * GROUP + i * W);
      to[g] = sum(total);
    }
    std::fill(to + groups, to + groups + W, 0.0f);
  }
}

// out[h * stride] = x[h] . row for H rows of x, dim numbers apart, with their sums of groups.
template <int BITS, int H>
inline void meet_tile(const QuantizedRow<BITS>& row, const float* x, const float* sums, int dim, float* out, int stride) {
  vf acc[H], least[H];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) acc[h] = least[h] = vf{};
  for (int first = 0; first < row.groups; first += W) {
    const int n = std::min(W, row.groups - first);
    const vf steps = row.scales_of(row.steps + first, n);
    if constexpr (BITS == 4) {
      const vf leasts = row.scales_of(row.leasts + first, n);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) least[h] += leasts * load(sums + h * (row.groups + W) + first);
    }
    float step[W];
    store(step, steps);
    for (int i = 0; i < n; ++i) {
      const int g = first + i;
      __builtin_prefetch(row.codes + int64_t(g) * row.BYTES + CODES_AHEAD);
      vf codes[PARTS_OF_GROUP];
      row.group(g, codes);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        const float* of = x + int64_t(h) * dim + g * GROUP;
        vf part = codes[0] * load(of);
#pragma GCC unroll 8
        for (int j = 1; j < PARTS_OF_GROUP; ++j) part += codes[j] * load(of + j * W);
        acc[h] += part * step[i];
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) out[h * stride] = sum(acc[h] + least[h]);
}

template <int BITS, int H = ROWS_TOGETHER>
inline void meet_some(int m, const QuantizedRow<BITS>& row, const float* x, const float* sums, int dim, float* out,
                      int stride) {
  if constexpr (H > 1)
    if (m < H) return meet_some<BITS, H - 1>(m, row, x, sums, dim, out, stride);
  meet_tile<BITS, H>(row, x, sums, dim, out, stride);
}

// All m rows of x.
template <int BITS>
inline void meet(const QuantizedRow<BITS>& row, int m, const float* x, const float* sums, int dim, float* out, int stride) {
  for (int h = 0; h < m; h += ROWS_TOGETHER)
    meet_some(m - h, row, x + int64_t(h) * dim, sums + int64_t(h) * (row.groups + W), dim, out + h * stride, stride);
}

template <int BITS>
int widen_rows(const WidenArgs& a) {
  const int dim = int(a.k);
  const int64_t n = a.end - a.begin, row_bytes = a.k * dtype_bytes(a.dtype);
  const int n_threads = int(std::max<int64_t>(1, std::min(a.n_threads, n * a.k / 65536)));
  auto work = [&](int thread) {
    float wide[GROUP];
    for (int64_t i = n * thread / n_threads; i < n * (thread + 1) / n_threads; ++i) {
      const QuantizedRow<BITS> row(a.w, a.scales, a.begin + i, dim);
      char* to = static_cast<char*>(a.out) + i * row_bytes;
      for (int g = 0; g < row.groups; ++g) {
        float scale[2] = {0.0f, 0.0f};
        widen(scale, row.steps + g, F16, 1);
        if constexpr (BITS == 4) widen(scale + 1, row.leasts + g, F16, 1);
        vf codes[PARTS_OF_GROUP];
        row.group(g, codes);
        for (int j = 0; j < PARTS_OF_GROUP; ++j) store(wide + j * W, codes[j] * scale[0] + splat(scale[1]));
        narrow(to + g * GROUP * dtype_bytes(a.dtype), a.dtype, wide, GROUP);
      }
    }
  };
  parallel(n_threads, work);
  return 0;
}

}  // namespace mp
