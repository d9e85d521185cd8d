// A pool of packed pages: where the codes of a page lie, and which of them a region holds.
#pragma once

#include "common/pages.hpp"
#include "common/prefetch.hpp"
#include "quantized/bit_tiles.hpp"
#include "quantized/packed_args.hpp"

namespace mp {

constexpr int RUN = 32;  // slots that are worked on at once: two tiles

// Words of the low bits and of the third bits that one lane needs for `depth` codes.
constexpr int64_t low_words(int f, int64_t depth) { return depth / per_word(f); }
constexpr int64_t top_words(int64_t depth) { return (depth + 31) / 32; }

// The pool with its divisions turned into shifts.
struct PackedPool {
  const PackedArgs& a;
  Pool pool;

  explicit PackedPool(const PackedArgs& args) : a(args), pool(args.pool) {}
  const int32_t* pages(int r) const { return a.table + r * a.table_row; }
  // The page that holds slot `slot`.
  char* page(const int32_t* pages, int64_t slot) const {
    const int64_t page = pages[slot >> pool.slot_shift], arena = page >> pool.arena_shift;
    return reinterpret_cast<char*>(pool.bases[arena]) + (page - (arena << pool.arena_shift)) * a.page_bytes;
  }
  // Where the keys of slot `slot` and those behind it begin.
  const char* keys(const int32_t* pages, int64_t slot) const {
    const int64_t in_page = slot & (pool.slots - 1), dim = pool.key_dim;
    const int64_t before = a.key.format == ROWS ? 2 * in_page * dim
                                                : in_page / LANES * low_words(int(a.key.format), dim) * TILE_BYTES;
    return page(pages, slot) + a.key.codes + before;
  }
  // The same of its values: of the first 16 channels where they lie in tiles.
  const char* values(const int32_t* pages, int64_t slot) const {
    const int64_t in_page = slot & (pool.slots - 1), dim = pool.value_dim;
    const int64_t before = a.value.format == ROWS ? 2 * in_page * dim
                                                  : low_words(int(a.value.format), in_page) * TILE_BYTES;
    return page(pages, slot) + a.value.codes + before;
  }
};

// What is asked for while a run is worked on: a run's share of one side, with its scales, of a page that is read later.
// A few lines at a time: many at once wait for one another.
struct Later {
  const char* next = nullptr;
  int64_t lines = 0;  // at each of the steps of a run

  Later() = default;
  Later(const PackedPool& packed, const int32_t* pages, int64_t slot, bool keys, int steps) {
    const int64_t split = packed.a.value.codes, begin = keys ? 0 : split, end = keys ? split : packed.a.page_bytes;
    const int64_t share = (end - begin) * RUN >> packed.pool.slot_shift;
    next = packed.page(pages, slot) + begin + share * ((slot & (packed.pool.slots - 1)) / RUN);
    lines = (share + 64 * steps - 1) / (64 * steps);
  }
  // Always inlined: GCC drops calls of a function that only prefetches.
  MP_INLINE void step() {
    for (int64_t i = 0; i < lines; ++i, next += 64) prefetch<64>(next);
  }
};

inline const f16* halves(const char* page, int64_t at) { return reinterpret_cast<const f16*>(page + at); }

}  // namespace mp
