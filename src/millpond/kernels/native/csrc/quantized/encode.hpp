// Numbers of a page to codes, group by group: the arithmetic of kernels/packed/groups.py and codes.py, bit for bit.
//
// Scales and zeros are rounded to float16 before codes are chosen. Compile without contraction of a * b + c.
#pragma once

#include <cmath>

#include "quantized/packed.hpp"

namespace mp {

enum Trouble : int { FINE = 0, NO_MEMORY = 1, NOT_FINITE = 2, TOO_LARGE = 3 };

// Rows (n, dim) of one side of a page as floats, and their codes. far: how far out each number lies, -1 where it is an
// outlier, which does not decide a range; null: there are no outliers.
struct Sheet {
  float* x;
  uint8_t* codes;
  float* far;
  int n, dim;
};

// The code of a float as e4m3, to nearest, ties to even; |f| <= 448.
inline uint8_t to_e4m3(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint32_t sign = (u >> 24) & 0x80u, size = u & 0x7fffffffu;
  if (size < 0x3c800000u) {  // below 2^-6: multiples of 2^-9, which the adder rounds to
    float whole;
    std::memcpy(&whole, &size, 4);
    return uint8_t(sign | uint32_t(std::nearbyint(whole * 512.0f)));
  }
  return uint8_t(sign | ((size - 0x3c000000u + 0x7ffffu + ((size >> 20) & 1u)) >> 20));
}

inline float widened(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const f16 row[W] = {x};
  return load(row)[0];
#endif
}

// Round to float16 what becomes a scale or a zero.
inline float half_of_float(float x, f16* to, bool& large) {
  large |= std::fabs(x) > 65504.0f;
  *to = {float_to_f16(x)};
  return widened(*to);
}

// A group's range, and what is stored of it: a number is (x - zero) * inverse in units of its scale.
struct Range {
  float least, most;
};
struct Unit {
  float zero, inverse;
};

MP_INLINE vf to_whole(vf x) {  // to nearest, ties to even, for |x| < 2^22
  const vf magic = splat(12582912.0f);
  return (x + magic) - magic;
}

MP_INLINE vf clamped(vf x, vf low, vf high) {
  x = select(x < low, low, x);
  return select(x > high, high, x);
}

// From ranges to units, and from numbers in units to codes, of one format.
template <int F>
struct Coder {
  static constexpr int LAST = (1 << bits_of(F)) - 1, HALF = 1 << (bits_of(F) - 1), CUTS = is_table(F) ? LAST : 0;
  bool symmetric;
  vf low, high, shift;
  vf cuts[CUTS + 1];

  explicit Coder(const SideArgs& a, bool around_zero) : symmetric(around_zero) {
    low = splat(symmetric ? float(1 - HALF) : 0.0f);
    high = splat(symmetric ? float(HALF - 1) : float(LAST));
    shift = splat(symmetric ? float(HALF) : 0.0f);
    for (int i = 0; i < CUTS; ++i) cuts[i] = splat(a.cuts[i]);
  }
  Unit unit(Range r, f16* scale_at, f16* zero_at, bool& large) const {
    if (r.least > r.most) r = {0.0f, 0.0f};  // nothing but outliers
    float spread, origin = 0.0f;
    if (is_table(F)) {
      spread = (r.most - r.least) / 2.0f, origin = (r.most + r.least) / 2.0f;
    } else if (symmetric) {
      spread = (r.most > -r.least ? r.most : -r.least) / float(HALF - 1);
    } else {
      spread = (r.most - r.least) / float(LAST), origin = r.least;
    }
    const float scale = half_of_float(spread, scale_at, large);
    return {symmetric ? 0.0f : half_of_float(origin, zero_at, large), scale > 0.0f ? 1.0f / scale : 0.0f};
  }
  // Writes the codes of W numbers.
  MP_INLINE void put(uint8_t* to, vf x, vf zero, vf inverse) const {
    typedef uint8_t vb __attribute__((vector_size(W)));
    const vf y = (x - zero) * inverse;
    vi code;
    if constexpr (is_table(F)) {
      code = splat(int32_t(CUTS));
      for (int i = 0; i < CUTS; ++i) code += (vi)(cuts[i] >= y);  // a mask is -1
    } else {
      code = __builtin_convertvector(clamped(to_whole(y), low, high) + shift, vi);
    }
    const vb bytes = __builtin_convertvector(code, vb);
    std::memcpy(to, &bytes, W);
  }
};

// The ranges of lanes, outliers left out.
struct Ranges {
  vf least = splat(__builtin_inff()), most = splat(-__builtin_inff());

  MP_INLINE void take(vf x) {
    least = select(x < least, x, least);
    most = select(x > most, x, most);
  }
  MP_INLINE void take(vf x, vf far) {
    const vi in = (vi)(far >= vf{});
    least = select(in & (vi)(x < least), x, least);
    most = select(in & (vi)(x > most), x, most);
  }
};

// Groups of `group` slots of each channel; scales and zeros (groups, dim). `page`: of the first slot.
template <int F>
void encode_by_channel(const SideArgs& a, const Sheet& s, int first, char* page, bool& large) {
  const int group = int(a.group);
  const Coder<F> coder(a, a.zeros < 0);
  for (int begin = 0; begin < s.n; begin += group) {
    const int64_t row = int64_t(first + begin) / group * s.dim;
    f16* scales = reinterpret_cast<f16*>(page + a.scales) + row;
    f16* zeros = a.zeros >= 0 ? reinterpret_cast<f16*>(page + a.zeros) + row : nullptr;
    for (int d = 0; d < s.dim; d += W) {
      const int64_t at = int64_t(begin) * s.dim + d;
      Ranges ranges;
      for (int t = 0; t < group; ++t) {
        const vf x = load(s.x + at + int64_t(t) * s.dim);
        s.far == nullptr ? ranges.take(x) : ranges.take(x, load(s.far + at + int64_t(t) * s.dim));
      }
      vf zero{}, inverse{};
      for (int i = 0; i < W; ++i) {
        const Unit u = coder.unit({ranges.least[i], ranges.most[i]}, scales + d + i, zeros + d + i, large);
        zero[i] = u.zero, inverse[i] = u.inverse;
      }
      for (int64_t t = 0; t < group; ++t) coder.put(s.codes + at + t * s.dim, load(s.x + at + t * s.dim), zero, inverse);
    }
  }
}

// Groups of `group` channels of each slot; scales and zeros (groups, slots).
template <int F>
void encode_by_slot(const SideArgs& a, const Sheet& s, int first, int slots, char* page, bool& large) {
  const int group = int(a.group);
  const Coder<F> coder(a, a.zeros < 0);
  for (int g = 0; g * group < s.dim; ++g) {
    f16* scales = reinterpret_cast<f16*>(page + a.scales) + int64_t(g) * slots + first;
    f16* zeros = a.zeros >= 0 ? reinterpret_cast<f16*>(page + a.zeros) + int64_t(g) * slots + first : nullptr;
    for (int t = 0; t < s.n; ++t) {
      const int64_t at = int64_t(t) * s.dim + g * group;
      Ranges ranges;
      for (int d = 0; d < group; d += W)
        s.far == nullptr ? ranges.take(load(s.x + at + d)) : ranges.take(load(s.x + at + d), load(s.far + at + d));
      const Unit u = coder.unit({-max(-ranges.least), max(ranges.most)}, scales + t, zeros + t, large);
      for (int d = 0; d < group; d += W)
        coder.put(s.codes + at + d, load(s.x + at + d), splat(u.zero), splat(u.inverse));
    }
  }
}

// Channels whose scales and zeros (dim,) were calibrated.
template <int F>
void encode_fixed(const SideArgs& a, const Sheet& s, const float* scales, const float* zeros) {
  const Coder<F> coder(a, false);
  for (int d = 0; d < s.dim; d += W) {
    const vf scale = load(scales + d), zero = load(zeros + d), inverse = select(scale > vf{}, 1.0f / scale, vf{});
    for (int64_t at = d; at < int64_t(s.n) * s.dim; at += s.dim) coder.put(s.codes + at, load(s.x + at), zero, inverse);
  }
}

inline void encode_e4m3(const SideArgs& a, const Sheet& s, char* page) {
  vf most{};
  for (int64_t i = 0; i < int64_t(s.n) * s.dim; i += W) {
    const vf x = load(s.x + i);
    most = vmax(most, select(x < vf{}, -x, x));
  }
  const float scale = max(most) / 448.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  std::memcpy(page + a.scales, &scale, 4);
  for (int64_t i = 0; i < int64_t(s.n) * s.dim; ++i)
    s.codes[i] = to_e4m3(std::min(448.0f, std::max(-448.0f, s.x[i] * inverse)));
}

// Store the means of a page's channels, and take them away from its numbers. Returns whether one is too large.
inline bool subtract_means(const Sheet& s, char* to) {
  f16* means = reinterpret_cast<f16*>(to);
  bool large = false;
  for (int d = 0; d < s.dim; d += W) {
    vf total = load(s.x + d), mean;
    for (int64_t t = 1; t < s.n; ++t) total += load(s.x + t * s.dim + d);
    total *= 1.0f / float(s.n);
    for (int i = 0; i < W; ++i) mean[i] = half_of_float(total[i], means + d + i, large);
    for (int64_t at = d; at < int64_t(s.n) * s.dim; at += s.dim) store(s.x + at, load(s.x + at) - mean);
  }
  return large;
}

// Whether all are finite; zeros lose their signs, so that equal numbers have equal codes.
inline bool settle(const Sheet& s) {
  vi bad{};
  for (int64_t i = 0; i < int64_t(s.n) * s.dim; i += W) {
    const vf x = load(s.x + i);
    bad |= ~((x - x) == vf{});
    store(s.x + i, x + vf{});
  }
  int any = 0;
  for (int i = 0; i < W; ++i) any |= bad[i];
  return any == 0;
}

}  // namespace mp
