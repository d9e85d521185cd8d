// A few rows of 16-bit floats, held as integers of 16 bits, times rows of a matrix of codes: see quantized_rows.hpp.
//
// A group of a row of x is scale * integer, the largest of its numbers +-32767: it is off by 2^-16 of that one at most, less
// than the numbers are themselves. Codes become integers of 16 bits by a shift and a mask, pairs of products are summed by
// one instruction, and all sums of a group are exact; only then they become floats.
#pragma once

#include "linear/quantized_rows.hpp"

#if defined(__AVX2__) && !defined(__AVX512F__)
#define MP_INTEGER_ROWS
namespace mp {

// How a run of 32 bytes of codes meets numbers of x. A word of two bytes holds 4 codes of 4 bits, or 2 of 8, one for each
// plane: in 4 bits even numbers of the first half of a group, even ones of the second, odd ones of the first, of the second;
// in 8 bits even and odd ones.
template <int BITS>
struct Planes {
  static constexpr int count = BITS == 4 ? 4 : 2;
  static constexpr int groups = BITS == 4 ? 2 : 1;  // that a run holds
  static constexpr int words = 16 * count;          // of a run
  static constexpr int bytes = 2 * words + 4 * W;   // of a run of x, with its scale for each lane of sums
  static constexpr int together = W / groups;       // runs whose scales are taken at once

  static int64_t runs(int64_t dim) { return (dim / GROUP + groups - 1) / groups; }

  static MP_INLINE void of(__m256i run, __m256i (&to)[count]) {
    if constexpr (BITS == 4) {
      const __m256i mask = _mm256_set1_epi16(15), high = _mm256_srli_epi16(run, 4);
      to[0] = _mm256_and_si256(run, mask);
      to[1] = _mm256_and_si256(high, mask);
      to[2] = _mm256_and_si256(_mm256_srli_epi16(run, 8), mask);
      to[3] = _mm256_srli_epi16(high, 8);
    } else {
      to[0] = _mm256_srai_epi16(_mm256_slli_epi16(run, 8), 8);
      to[1] = _mm256_srai_epi16(run, 8);
    }
  }
};

// 16 floats as integers of 16 bits: the 8 even ones in the lower half, the odd ones in the upper.
MP_INLINE __m256i even_and_odd(const float* x, __m256 inverse) {
  const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
  const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), inverse));
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13, 2, 3,
                                         6, 7, 10, 11, 14, 15);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
  return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(words, order), 0xD8);
}

// Rows of x (m, dim) as integers, in the order in which they meet codes: of up to ROWS_TOGETHER rows run after run, of each
// its planes and its scales.
template <int BITS>
class IntegerRows {
  using P = Planes<BITS>;

 public:
  static int64_t room(int64_t m, int64_t dim) { return m * P::runs(dim) * P::bytes; }

  IntegerRows(const float* x, int m, int dim, char* memory) : memory_(memory), row_bytes_(P::runs(dim) * P::bytes) {
    std::memset(memory, 0, size_t(room(m, dim)));  // what a last run has too much
    for (int first = 0; first < m; first += ROWS_TOGETHER) {
      const int n = std::min(ROWS_TOGETHER, m - first);
      for (int h = 0; h < n; ++h)
        for (int g = 0; g < dim / GROUP; ++g)
          take_in(x + int64_t(first + h) * dim + g * GROUP, memory + first * row_bytes_ + (g / P::groups * n + h) * P::bytes,
                  g % P::groups);
    }
  }

  // Rows `first` and those together with it.
  const char* rows(int first) const { return memory_ + first * row_bytes_; }

 private:
  // A group, the first or second of a run. A number that is not finite makes its sums NaN.
  static void take_in(const float* x, char* to, int part) {
    vf most{}, odd{};
    for (int i = 0; i < GROUP; i += W) {
      const vf v = load(x + i);
      most = vmax(vmax(v, -v), most);
      odd += v * 0.0f;
    }
    const float largest = max(most), scale = largest / 32767.0f + sum(odd);
    const __m256 inverse = _mm256_set1_ps(largest > 0.0f ? 32767.0f / largest : 0.0f);
    const __m256i first = even_and_odd(x, inverse), second = even_and_odd(x + 16, inverse);
    const __m128i halves[4] = {_mm256_castsi256_si128(first), _mm256_castsi256_si128(second),
                               _mm256_extracti128_si256(first, 1), _mm256_extracti128_si256(second, 1)};
    __m128i* words = reinterpret_cast<__m128i*>(to);
    for (int i = 0; i < 4; ++i) _mm_storeu_si128(words + (BITS == 4 ? 2 * i + part : i), halves[i]);
    float* scales = reinterpret_cast<float*>(to + 2 * P::words);
    constexpr int lanes = W / P::groups;
    std::fill(scales + part * lanes, scales + (part + 1) * lanes, scale);
  }

  char* memory_;
  int64_t row_bytes_;
};

// The first n of W scales of groups, `left` of them up to the end of the row and `before` in front of them; zeros behind.
MP_INLINE vf scales_up_to(const f16* from, int n, int before) {
  if (n >= W) return load(from);
  if (n + before < W) return load_part(from, n);
  const vi lane = iota();  // reading ends where the row does
  const __m256 last = (__m256)load(from + n - W);
  return (vf)((vi)_mm256_permutevar8x32_ps(last, (__m256i)(lane + (W - n))) & (lane < n));
}

// The steps of run I of those whose steps are given, in the lanes of its sums.
template <int BITS, int I>
MP_INLINE vf steps_of_run(vf steps) {
  constexpr int a = BITS == 4 ? 2 * I : I, b = BITS == 4 ? a + 1 : a;
  return (vf)_mm256_permutevar8x32_ps((__m256)steps, _mm256_setr_epi32(a, a, a, a, b, b, b, b));
}

// Adds the products of run I of 32 bytes and those behind it with H rows of x.
template <int BITS, int H, int I = 0>
MP_INLINE void meet_runs(const uint8_t* codes, vf steps, const char* x, int n, vf (&acc)[H]) {
  using P = Planes<BITS>;
  if constexpr (I < P::together) {
    if (I * P::groups >= n) return;
    const __m256i* from = reinterpret_cast<const __m256i*>(codes) + I;
    const bool half = P::groups == 2 && n == 2 * I + 1;
    const __m256i run = half ? _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))
                             : _mm256_loadu_si256(from);
    const vf step = steps_of_run<BITS, I>(steps);
    __m256i planes[P::count];
    P::of(run, planes);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const char* row = x + (I * H + h) * P::bytes;
      const __m256i* words = reinterpret_cast<const __m256i*>(row);
      __m256i total = _mm256_madd_epi16(planes[0], _mm256_loadu_si256(words));
#pragma GCC unroll 4
      for (int p = 1; p < P::count; ++p)
        total = _mm256_add_epi32(total, _mm256_madd_epi16(planes[p], _mm256_loadu_si256(words + p)));
      acc[h] += to_float((vi)total) * (step * load(reinterpret_cast<const float*>(words + P::count)));
    }
    meet_runs<BITS, H, I + 1>(codes, steps, x, n, acc);
  }
}

// out[h * stride] = x[h] . row for H rows of x, with the sums of their groups.
template <int BITS, int H>
inline void meet_integers(const QuantizedRow<BITS>& row, const char* x, const float* sums, float* out, int stride) {
  using P = Planes<BITS>;
  vf acc[H], least[H];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) acc[h] = least[h] = vf{};
  const uint8_t* codes = row.codes;
  for (int g = 0; g < row.groups; g += W, codes += W * row.BYTES, x += P::together * H * P::bytes) {
    const int n = std::min(W, row.groups - g);
    const vf steps = scales_up_to(row.steps + g, n, g);
    if constexpr (BITS == 4) {
      const vf leasts = scales_up_to(row.leasts + g, n, g);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) least[h] += leasts * load(sums + h * (row.groups + W) + g);
    }
    for (int i = 0; i < W * row.BYTES; i += 64) __builtin_prefetch(codes + CODES_AHEAD + i);
    if (n == W)
      meet_runs<BITS, H>(codes, steps, x, W, acc);
    else
      meet_runs<BITS, H>(codes, steps, x, n, acc);
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) out[h * stride] = sum(acc[h] + least[h]);
}

template <int BITS, int H = ROWS_TOGETHER>
inline void meet_some(int m, const QuantizedRow<BITS>& row, const char* x, const float* sums, float* out, int stride) {
  if constexpr (H > 1)
    if (m < H) return meet_some<BITS, H - 1>(m, row, x, sums, out, stride);
  meet_integers<BITS, H>(row, x, sums, out, stride);
}

}  // namespace mp
#endif
