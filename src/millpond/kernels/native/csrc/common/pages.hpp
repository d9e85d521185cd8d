// Where a slot of a region lies.
#pragma once

#include <algorithm>

#include "common/args.hpp"
#include "common/convert.hpp"

namespace mp {

inline int log2_of(int64_t power) { return __builtin_ctzll(uint64_t(power)); }

// The pool with its divisions turned into shifts.
struct Pool {
  const int64_t* bases;
  int64_t n_arenas, slots, key_dim, value_dim, dtype, item;
  int arena_shift, slot_shift;
  bool masses;

  explicit Pool(const PoolArgs& a)
      : bases(a.bases), n_arenas(a.n_arenas), slots(a.slots), key_dim(a.key_dim), value_dim(a.value_dim),
        dtype(a.dtype), item(dtype_bytes(a.dtype)), arena_shift(log2_of(a.pages_per_arena)),
        slot_shift(log2_of(a.slots)), masses(a.masses != 0) {}

  // Address of slot `slot` in array `which` (0 keys, 1 values, 2 positions, 3 scores, 4 log masses), rows of `row_bytes`.
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
  float* log_mass(const int32_t* pages, int64_t slot) const {
    return reinterpret_cast<float*>(at(4, pages, slot, 4));
  }

  // Slots from `slot` to the end of its page, `end` or `most`, whichever comes first.
  int run(int64_t slot, int64_t end, int64_t most) const {
    return int(std::min(std::min(slots - (slot & (slots - 1)), end - slot), most));
  }
};

inline const void* offset(const void* p, int64_t dtype, int64_t elements) {
  return static_cast<const char*>(p) + elements * dtype_bytes(dtype);
}

}  // namespace mp
