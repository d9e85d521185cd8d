// Entries beside the codes: the numbers of a page that lie farthest out, and what their codes lack of them.
//
// The arithmetic is that of kernels/packed/codes.py, bit for bit, the order of its sums included.
#pragma once

#include "quantized/encode.hpp"

namespace mp {

constexpr float TINY = 1.17549435e-38f;  // the least normal float

MP_INLINE vf size_of(vf x) { return (vf)((vi)x & splat(int32_t(0x7fffffff))); }

// How far from the middle of the calibrated range of its channel each number lies, in units of it.
template <int F>
void far_of_fixed(const Sheet& s, const float* scales, const float* zeros) {
  const float most = float((1 << bits_of(F)) - 1);
  for (int d = 0; d < s.dim; d += W) {
    const vf scale = load(scales + d), zero = load(zeros + d);
    const vf middle = is_table(F) ? zero : zero + scale * most / 2.0f, unit = vmax(scale, splat(TINY));
    for (int64_t at = d; at < int64_t(s.n) * s.dim; at += s.dim) store(s.far + at, size_of((load(s.x + at) - middle) / unit));
  }
}

// The same from the mean of its group of slots, in standard deviations: sums go slot after slot.
inline void far_by_channel(const Sheet& s, int group) {
  for (int begin = 0; begin < s.n; begin += group)
    for (int d = 0; d < s.dim; d += W) {
      const int64_t first = int64_t(begin) * s.dim + d, end = first + int64_t(group) * s.dim;
      vf sum = load(s.x + first), squares{};
      for (int64_t at = first + s.dim; at < end; at += s.dim) sum += load(s.x + at);
      const vf mean = sum / float(group);
      for (int64_t at = first; at < end; at += s.dim) {
        const vf away = size_of(load(s.x + at) - mean);
        store(s.far + at, away);
        squares = at == first ? away * away : squares + away * away;
      }
      vf unit = squares / float(group);
      for (int i = 0; i < W; ++i) unit[i] = std::max(TINY, std::sqrt(unit[i]));
      for (int64_t at = first; at < end; at += s.dim) store(s.far + at, size_of(load(s.far + at) / unit));
    }
}

// The sum of 16 lanes, half onto half.
inline float folded(const vf* parts) {
  float lanes[LANES];
  std::memcpy(lanes, parts, sizeof lanes);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// The same of groups of channels: sums go 16 channels after 16, then half onto half.
inline void far_by_slot(const Sheet& s, int group) {
  for (int64_t begin = 0; begin < int64_t(s.n) * s.dim; begin += group) {
    vf sum[PARTS], squares[PARTS];
    for (int d = 0; d < group; d += LANES)
      for (int p = 0; p < PARTS; ++p) {
        const vf x = load(s.x + begin + d + p * W);
        sum[p] = d == 0 ? x : sum[p] + x;
      }
    const float mean = folded(sum) / float(group);
    for (int d = 0; d < group; d += LANES)
      for (int p = 0; p < PARTS; ++p) {
        const int64_t at = begin + d + p * W;
        const vf away = size_of(load(s.x + at) - mean);
        store(s.far + at, away);
        squares[p] = d == 0 ? away * away : squares[p] + away * away;
      }
    const float unit = std::max(TINY, std::sqrt(folded(squares) / float(group)));
    for (int d = 0; d < group; d += W) store(s.far + begin + d, size_of(load(s.far + begin + d) / unit));
  }
}

// How many of n numbers, none below 0, have at least these bits. n: a multiple of W.
inline int64_t count_from(const float* far, int64_t n, int32_t bits) {
  vi count{};
  for (int64_t i = 0; i < n; i += W) count -= (vi)((vi)load(far + i) >= splat(bits));
  int64_t all = 0;
  for (int i = 0; i < W; ++i) all += count[i];
  return all;
}

// The largest bits of n numbers, none below 0: those of a NaN, where there is one.
inline int32_t most_bits(const float* far, int64_t n) {
  vi most{};
  for (int64_t i = 0; i < n; i += W) {
    const vi bits = (vi)load(far + i);
    most = select((vi)(bits > most), bits, most);
  }
  int32_t top = 0;
  for (int i = 0; i < W; ++i) top = std::max(top, most[i]);
  return top;
}

// The bits of the k-th largest of n numbers, none below 0 or above `top`; or fewer bits that as many numbers have.
inline int32_t bits_of_kth(const float* far, int64_t n, int64_t k, int32_t top) {
  int32_t low = 0;
  for (int32_t high = top + 1; high - low > 1;) {
    const int32_t middle = low + (high - low) / 2;
    const int64_t found = count_from(far, n, middle);
    (found >= k ? low : high) = middle;
    if (found == k) break;
  }
  return low;
}

// Marks the n_extra numbers that lie farthest out, the first of equal ones, and writes their places into the page.
inline int mark_outliers(const SideArgs& a, const Sheet& s, char* page) {
  const int64_t n = int64_t(s.n) * s.dim, k = a.n_extra;
  const int32_t top = most_bits(s.far, n);
  if (top > 0x7f800000) return TOO_LARGE;  // NaN: squares beyond float
  const int32_t least = bits_of_kth(s.far, n, k, top);
  int64_t equal = k - count_from(s.far, n, least + 1), found = 0;
  uint16_t* where = reinterpret_cast<uint16_t*>(page + a.extra);
  for (int64_t i = 0; i < n && found < k; i += W) {
    if (most_bits(s.far + i, W) < least) continue;
    for (int64_t at = i; at < i + W; ++at) {
      int32_t bits;
      std::memcpy(&bits, s.far + at, 4);
      if (bits < least || (bits == least && equal-- <= 0)) continue;
      s.far[at] = -1.0f;
      where[found++] = uint16_t(at / s.dim * 256 + at % s.dim);
    }
  }
  return FINE;
}

// Writes what the codes of the marked numbers lack. scales, zeros (dim,): calibrated, or null.
inline void write_remainders(const SideArgs& a, const Sheet& s, int slots, const float* scales, const float* zeros,
                             char* page, bool& large) {
  const uint16_t* where = reinterpret_cast<const uint16_t*>(page + a.extra);
  f16* what = reinterpret_cast<f16*>(page + a.extra + 2 * a.n_extra);
  const int shift = a.zeros < 0 && scales == nullptr ? 1 << (bits_of(int(a.format)) - 1) : 0;
  for (int64_t i = 0; i < a.n_extra; ++i) {
    const int t = where[i] / 256, d = where[i] % 256;
    const int64_t at = int64_t(t) * s.dim + d;
    const int64_t factor = a.by_channel ? t / a.group * s.dim + d : d / a.group * slots + t;
    const float scale = scales != nullptr ? scales[d] : widened(halves(page, a.scales)[factor]);
    const float zero = zeros != nullptr ? zeros[d] : a.zeros >= 0 ? widened(halves(page, a.zeros)[factor]) : 0.0f;
    const float number = is_table(int(a.format)) ? a.table[s.codes[at]] : float(s.codes[at] - shift);
    half_of_float(s.x[at] - (number * scale + zero), what + i, large);
  }
}

}  // namespace mp
