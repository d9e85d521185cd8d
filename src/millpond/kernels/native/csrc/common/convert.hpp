// Rows of numbers from one storage type to another, by way of float.
#pragma once

#include "common/args.hpp"
#include "common/simd.hpp"

namespace mp {

inline int64_t dtype_bytes(int64_t dtype) { return dtype == F32 ? 4 : 2; }

inline uint16_t float_to_f16(float f) {
#if defined(__F16C__)
  return uint16_t(_cvtss_sh(f, 0));
#else
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint32_t sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {                                  // subnormal: let the adder round
    float size;
    std::memcpy(&size, &magnitude, 4);
    const float shifted = size + 0.5f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    return uint16_t(sign | (bits - 0x3f000000u));
  }
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
#endif
}

template <class T>
inline void widen_as(float* to, const T* from, int n) {
  int i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i));
  if (i < n) store_part(to + i, load_part(from + i, n - i), n - i);
}

// n numbers of any type as floats.
inline void widen(float* to, const void* from, int64_t dtype, int n) {
  if (dtype == F32)
    std::memcpy(to, from, size_t(n) * 4);
  else if (dtype == BF16)
    widen_as(to, static_cast<const bf16*>(from), n);
  else
    widen_as(to, static_cast<const f16*>(from), n);
}

// float_to_bf16 of W floats: the bits in the upper halves; what is in the lower ones says nothing.
MP_INLINE vu round_bf16(vf x) {
  const vu u = (vu)x;
  const vi nan = (u & 0x7fffffffu) > 0x7f800000u;
  return (vu)select(nan, (vi)(u | 0x400000u), (vi)(u + 0x7fffu + ((u >> 16) & 1u)));
}

// n floats, rounded to the nearest number of any type.
inline void narrow(void* to, int64_t dtype, const float* from, int n) {
  uint16_t* halves = static_cast<uint16_t*>(to);
  if (dtype == F32) {
    std::memcpy(to, from, size_t(n) * 4);
  } else if (dtype == BF16) {
    typedef uint16_t vh __attribute__((vector_size(W * 2)));
    int i = 0;
    for (; i + W <= n; i += W) store(halves + i, __builtin_convertvector(round_bf16(load(from + i)) >> 16, vh));
    for (; i < n; ++i) halves[i] = float_to_bf16(from[i]);
  } else {
    for (int i = 0; i < n; ++i) halves[i] = float_to_f16(from[i]);
  }
}

// n numbers, rounded where the types differ.
inline void copy_row(void* to, int64_t to_dtype, const void* from, int64_t from_dtype, int64_t n) {
  if (to_dtype == from_dtype) {
    std::memcpy(to, from, size_t(n * dtype_bytes(to_dtype)));
    return;
  }
  constexpr int64_t PART = 64;
  float part[PART];
  for (int64_t i = 0; i < n; i += PART) {
    const int m = int(n - i < PART ? n - i : PART);
    widen(part, static_cast<const char*>(from) + i * dtype_bytes(from_dtype), from_dtype, m);
    narrow(static_cast<char*>(to) + i * dtype_bytes(to_dtype), to_dtype, part, m);
  }
}

// n floats, rounded to what `dtype` can hold.
inline void round_to(float* x, int64_t dtype, int n) {
  if (dtype == F32) return;
  if (dtype == BF16) {
    int i = 0;
    for (; i + W <= n; i += W) store(x + i, (vf)(round_bf16(load(x + i)) & 0xffff0000u));
    for (; i < n; ++i) x[i] = bf16_to_float(float_to_bf16(x[i]));
    return;
  }
  constexpr int PART = 64;
  uint16_t part[PART];
  for (int i = 0; i < n; i += PART) {
    const int m = n - i < PART ? n - i : PART;
    narrow(part, dtype, x + i, m);
    widen(x + i, part, dtype, m);
  }
}

// n numbers as floats, rounded on the way to what `stored` can hold.
inline void widen_as_stored(float* to, const void* from, int64_t dtype, int64_t stored, int n) {
  widen(to, from, dtype, n);
  if (stored != dtype) round_to(to, stored, n);
}

}  // namespace mp
