// The C ABI of packed pages: see common/args.hpp.
#pragma once

#include "common/args.hpp"

namespace mp {

enum Format : int64_t { INT2 = 2, INT3 = 3, INT4 = 4, INT8 = 8, FP8 = 9, ROWS = 16, NUQ2 = 18, NUQ3 = 19, NUQ4 = 20 };

// How the keys or the values of a page are stored. Offsets are bytes from the begin of the page, -1: there is none.
struct SideArgs {
  int64_t format;
  int64_t by_channel;  // a group is `group` slots of one channel; otherwise `group` channels of one slot
  int64_t group;
  int64_t codes, top, scales, zeros;  // top: third bits
  int64_t factor_bytes;               // of scales and zeros and what follows them
  int64_t means;                      // (dim,) f16: the mean of a page's keys, which codes stand beside
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
  const int32_t* value_channels;  // (R, value_dim) ascending channels of the output that the values keep, or null: all
  RopeArgs rope;
};

struct PackedDecodeArgs {
  DecodeArgs plain;
  PackedArgs packed;
};

// Rows into packed pages.
struct PackedWriteArgs {
  PackedArgs packed;
  const int32_t *start, *count;  // (R,)
  const int32_t* index;          // (R, width)
  int64_t index_row, width, n_regions, n_kv_heads;
  const void *keys, *values;  // (R, N, dim)
  const int32_t* positions;   // (R, N)
  const float *scores, *log_masses;  // (R, N) or null
  int64_t k_dtype, v_dtype;
  int64_t k_region, k_row, v_region, v_row, p_region, p_row, s_region, s_row, m_region, m_row;  // strides
  int64_t n_threads;
};

// Packed pages as rows of floats; rows behind the last slot of a region stay as they are.
struct PackedReadArgs {
  PackedArgs packed;
  float *keys, *values;         // (R, width, head_dim), (R, width, value_dim)
  int32_t* positions;           // (R, width)
  float *scores, *log_masses;   // (R, width); masses or null
  int64_t n_regions, n_kv_heads, width, head_dim, value_dim, n_threads;
};

}  // namespace mp
