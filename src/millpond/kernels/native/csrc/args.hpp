// The C ABI: one struct of 8-byte fields per op, packed by the Python side in the same order (see native/calls.py).
// Strides count elements, not bytes. Pointers may be null where the Python side says None.
#pragma once

#include <cstdint>

#include "simd.hpp"

namespace mp {

enum DType : int64_t { F32 = 0, F16 = 1, BF16 = 2 };
enum Signal : int64_t { NO_SIGNAL = 0, SUM = 1, LAST = 2 };
enum Reduce : int64_t { MEAN = 0, MAX = 1, ADD = 2 };
enum Evict : int64_t { NEVER = 0, ACC = 1, ACC_MEAN = 2, OLDEST = 3, RANDOM = 4 };

// The memory of a page pool: page i is row i % pages_per_arena of arena i / pages_per_arena.
struct PoolArgs {
  const int64_t* bases;  // (4, n_arenas): keys, values, positions, scores
  int64_t n_arenas, pages_per_arena, slots, key_dim, value_dim, dtype;
};

struct DecodeArgs {
  PoolArgs pool;
  const void* q;      // (S, Hq, key_dim)
  const void* k_new;  // (S, Hkv, key_dim)
  const void* v_new;  // (S, Hkv, value_dim)
  int64_t q_dtype, k_dtype, v_dtype;
  int64_t q_seq, q_head, k_seq, k_head, v_seq, v_head;  // strides
  const int32_t* table;                                 // (R, n)
  int64_t table_row;                                    // stride
  int32_t* lens;                                        // (R,)
  const int32_t *caps, *recent;                         // (R,)
  const int32_t* q_pos;                                 // (S,)
  const float* sink_logits;                             // (Hq,) or null
  void* out;                                            // (S, Hq, value_dim) in q's dtype
  float* lse;                                           // (S, Hq)
  int32_t* evicted;                                     // (R,)
  int64_t n_seq, n_heads, n_kv_heads, window;
  int64_t signal, reduce, evict, sinks, shared, seed, n_threads;
  double scale, softcap, decay;
};

struct WriteArgs {
  PoolArgs pool;
  const int32_t* table;  // (R, n)
  int64_t table_row, n_regions;
  const int32_t *start, *count;  // (R,)
  const int32_t* index;          // (R, width)
  int64_t index_row, width;
  const void *keys, *values;    // (R, N, dim)
  const int32_t* positions;     // (R, N)
  const float* scores;          // (R, N) or null
  int64_t k_dtype, v_dtype;
  int64_t k_region, k_row, v_region, v_row, p_region, p_row, s_region, s_row;  // strides
  int64_t n_threads;
};

struct ReadArgs {
  PoolArgs pool;
  const int32_t* table;
  int64_t table_row, n_regions;
  const int32_t* lens;
  int64_t width;
  void *keys, *values;  // (R, width, dim) in the pool's dtype
  int32_t* positions;
  float* scores;
  int64_t n_threads;
};

struct PrefillArgs {
  const void *q, *k, *v;  // (Hq, Q, key_dim), (Hkv, N, key_dim), (Hkv, N, value_dim)
  int64_t q_dtype, k_dtype, v_dtype;
  int64_t q_head, q_row, k_head, k_row, v_head, v_row;  // strides
  const int32_t* q_pos;                                 // (Q,)
  const int32_t* past_pos;                              // (Hkv or 1, N - Q), null where there is no past
  int64_t past_row;                                     // stride, 0 where all heads share it
  const float* sink_logits;                             // (Hq,) or null
  void* out;                                            // (Hq, Q, value_dim) in q's dtype
  float* lse;                                           // (Hq, Q)
  float* sums;                                          // (Hkv, N) or null: column sums
  int64_t n_heads, n_kv_heads, n_queries, n_columns, key_dim, value_dim;
  int64_t window, reduce, n_threads;
  double scale, softcap;
};

struct LinearArgs {
  const void *x, *w, *bias;  // (m, k), (n, k), (n,) or null, all of one dtype
  void* out;                 // (m, n), contiguous
  int64_t m, n, k, x_row, w_row, dtype, n_threads;
};

}  // namespace mp
