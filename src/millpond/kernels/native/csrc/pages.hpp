// Where a slot of a region lies, and numbers of any storage type.
#pragma once

#include <algorithm>

#include "args.hpp"

namespace mp {

inline int log2_of(int64_t power) { return __builtin_ctzll(uint64_t(power)); }
inline int64_t dtype_bytes(int64_t dtype) { return dtype == F32 ? 4 : 2; }

// The pool with its divisions turned into shifts.
struct Pool {
  const int64_t* bases;
  int64_t n_arenas, slots, key_dim, value_dim, dtype, item;
  int arena_shift, slot_shift;

  explicit Pool(const PoolArgs& a)
      : bases(a.bases), n_arenas(a.n_arenas), slots(a.slots), key_dim(a.key_dim), value_dim(a.value_dim),
        dtype(a.dtype), item(dtype_bytes(a.dtype)), arena_shift(log2_of(a.pages_per_arena)),
        slot_shift(log2_of(a.slots)) {}

  // Address of slot `slot` in array `which` (0 keys, 1 values, 2 positions, 3 scores), rows of `row_bytes`.
  char* at(int which, const int32_t* pages, int64_t slot, int64_t row_bytes) const {
    const int64_t page = pages[slot >> slot_shift];
    const int64_t arena = page >> arena_shift;
    const int64_t row = ((page - (arena << arena_shift)) << slot_shift) + (slot & (slots - 1));
    return reinterpret_cast<char*>(bases[which * n_arenas + arena]) + row * row_bytes;
  }
  char* key(const int32_t* pages, int64_t slot) const { return at(0, pages, slot, key_dim * item); }
  char* value(const int32_t* pages, int64_t slot) const { return at(1, pages, slot, value_dim * item); }
  int32_t* position(const int32_t* pages, int64_t slot) const {
    return reinterpret_cast<int32_t*>(at(2, pages, slot, 4));
  }
  float* score(const int32_t* pages, int64_t slot) const { return reinterpret_cast<float*>(at(3, pages, slot, 4)); }

  // Slots from `slot` to the end of its page, `end` or `most`, whichever comes first.
  int run(int64_t slot, int64_t end, int64_t most) const {
    return int(std::min(std::min(slots - (slot & (slots - 1)), end - slot), most));
  }
};

inline float f16_to_float(uint16_t bits) {
  uint32_t magnitude = uint32_t(bits & 0x7fffu) << 13, sign = uint32_t(bits & 0x8000u) << 16;
  float f;
  if (magnitude >= 0x0f800000u) {
    magnitude |= 0x7f800000u;
    std::memcpy(&f, &magnitude, 4);
  } else {
    std::memcpy(&f, &magnitude, 4);
    f *= 0x1p112f;
  }
  uint32_t u;
  std::memcpy(&u, &f, 4);
  u |= sign;
  std::memcpy(&f, &u, 4);
  return f;
}

inline uint16_t float_to_f16(float f) {
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
}

inline float get_number(const void* p, int64_t dtype, int64_t i) {
  if (dtype == F32) return static_cast<const float*>(p)[i];
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  return dtype == BF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

inline void put_number(void* p, int64_t dtype, int64_t i, float x) {
  if (dtype == F32)
    static_cast<float*>(p)[i] = x;
  else
    static_cast<uint16_t*>(p)[i] = dtype == BF16 ? float_to_bf16(x) : float_to_f16(x);
}

inline const void* offset(const void* p, int64_t dtype, int64_t elements) {
  return static_cast<const char*>(p) + elements * dtype_bytes(dtype);
}

// n numbers, rounded to the nearest of the target type.
inline void copy_row(void* to, int64_t to_dtype, const void* from, int64_t from_dtype, int64_t n) {
  if (to_dtype == from_dtype) {
    std::memcpy(to, from, size_t(n * dtype_bytes(to_dtype)));
    return;
  }
  for (int64_t i = 0; i < n; ++i) put_number(to, to_dtype, i, get_number(from, from_dtype, i));
}

}  // namespace mp
