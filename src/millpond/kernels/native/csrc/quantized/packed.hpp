// A pool of packed pages: where the codes of a page lie, and which of them a region holds.
#pragma once

#include "common/pages.hpp"
#include "common/prefetch.hpp"
#include "quantized/bit_tiles.hpp"

namespace mp {

// How the keys or the values of a page are stored. Offsets are bytes from the begin of the page, -1: there is none.
struct SideArgs {
  int64_t format;
  int64_t by_channel;  // a group is `group` slots of one channel; otherwise `group` channels of one slot
  int64_t group;
  int64_t codes, top, scales, zeros;  // top: third bits
  int64_t factor_bytes;               // of scales and zeros and what follows them
  int64_t extra, n_extra;             // entries beside the codes: (slot * 256 + channel) u16 each, then f16 remainders
  const float *table, *cuts;          // (2^b,), (2^b - 1,): the numbers of a table format, and what lies between codes
  const float *fixed_scales, *fixed_zeros;  // (Hkv, dim): per channel, in place of those of the page; or null
};

// How keys that are stored before RoPE are turned when they are read; no pairs: they are stored as they are.
struct RopeArgs {
  int64_t n_pairs, n_positions;
  const int32_t* pairs;               // (n_pairs, 2): channels a, b: a' = a cos - b sin, b' = b cos + a sin
  const float *cos, *sin;             // (n_positions, n_pairs)
  const float *near_cos, *near_sin;   // (n_pairs, 32): of the first positions, without the scale of the others
};

// The packed part of a pool and of the regions of one call. In `pool` row 0 of the bases are pages of `page_bytes`.
struct PackedArgs {
  PoolArgs pool;
  int64_t page_bytes;
  SideArgs key, value;
  const int32_t* table;  // (R, n)
  int64_t table_row;     // stride
  const int32_t* lens;   // (R,) slots in use, tombstones included
  int32_t* dead;         // (R,) tombstones: slots whose position is -1
  const int32_t* channels;  // (R, key_dim) which channels of the query the keys keep, or null: all
  const float* balance;     // (R, key_dim) factors of the query, or null: all 1
  RopeArgs rope;
};

constexpr int RUN = 32;  // slots that are worked on at once: two tiles

struct PackedDecodeArgs {
  DecodeArgs plain;
  PackedArgs packed;
};

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
