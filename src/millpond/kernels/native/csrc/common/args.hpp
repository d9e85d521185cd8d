// The C ABI: one struct of 8-byte fields per op, packed by the Python side in the same order (native/abi.py).
// Strides count elements, not bytes. Pointers may be null where the Python side says None.
#pragma once

#include <cstdint>

namespace mp {

enum DType : int64_t { F32 = 0, F16 = 1, BF16 = 2 };
enum Signal : int64_t { NO_SIGNAL = 0, SUM = 1, LAST = 2 };
enum Reduce : int64_t { MEAN = 0, MAX = 1, ADD = 2 };
enum Gate : int64_t { NO_GATE = 0, SILU = 1, GELU = 2, GELU_TANH = 3, RELU = 4 };
enum Evict : int64_t { NEVER = 0, ACC = 1, ACC_MEAN = 2, OLDEST = 3, RANDOM = 4, HEAVIEST = 5, SPACED = 6 };

constexpr int MOST_LEAST = 256;  // spans of which some entries stay, see DecodeArgs

enum Weigh : int64_t { BY_NORMS = 0, BY_EXP = 1, BY_COUNT = 2, BY_SCORE = 3, BY_CHANCE = 4 };
enum Over : int64_t { OVER_TARGETS = 0, OVER_RECENT = 1, OVER_MAX = 2 };

// The memory of a page pool: page i is row i % pages_per_arena of arena i / pages_per_arena.
struct PoolArgs {
  const int64_t* bases;  // (5, n_arenas): keys, values, positions, scores, log masses
  int64_t n_arenas, pages_per_arena, slots, key_dim, value_dim, dtype;
  int64_t masses;  // whether there are log masses
};

// Arrays of rows that lie in arenas: row i of array k is row i % per_arena of the arena whose address is
// bases[which[k] * n_arenas + i / per_arena].
struct RowArrays {
  const int64_t* bases;      // (n, n_arenas)
  const int64_t* which;      // (n_arrays,)
  const int64_t* row_bytes;  // (n_arrays,)
  int64_t n_arrays, n_arenas;
  int64_t per_arena;  // a power of two
};

// Rows of `from` become those of `to`, array after array; both have as many arrays, with rows of as many bytes.
struct MoveRowsArgs {
  RowArrays from, to;
  const int64_t *from_rows, *to_rows;  // (n_rows,); null: 0 .. n_rows - 1
  int64_t n_rows;
};

// Pages, written one after another for each array: a run. The rest of the room becomes 0.
struct PackRunArgs {
  RowArrays pages;
  const int64_t* ids;  // (n_pages,)
  int64_t n_pages;
  uint8_t* room;  // (room_bytes,)
  int64_t room_bytes;
  int64_t generation;  // what the checksum begins with
};

// Runs in a buffer, some of whose pages become pages of arenas.
struct UnpackRunsArgs {
  RowArrays pages;
  const uint8_t* data;
  const int64_t* places;       // (n_runs,) where each begins in `data`
  const int64_t* n_pages;      // (n_runs,) that it holds
  const int64_t* generations;  // (n_runs,)
  const int64_t* checksums;    // (n_runs,)
  const int64_t* first;        // (n_runs + 1,) of `rows` and `ids`, those of each run
  const int64_t *rows, *ids;   // pages of the run, and those of arenas
  int64_t n_runs;
};

// Checksums (CRC-32C) of rows of bytes, each behind those of another checksum.
struct ChecksumArgs {
  const uint8_t* rows;     // (n, bytes)
  const uint32_t* before;  // (n,); null: nothing before
  uint32_t* checksums;     // (n,)
  int64_t n, bytes, row_bytes;
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
  int64_t signal, reduce, evict, sinks, shared, seed;
  int64_t unit_width, unit_shift, stride;  // of SPACED
  int64_t n_threads;
  const int32_t* kept;  // (S, n_kept, 2): spans [begin, end) of positions that never leave; null without any
  int64_t n_kept;
  const int32_t* least;  // (S, n_least, 3): spans [begin, end) and the fewest entries of each that stay; null without any
  int64_t n_least;       // at most MOST_LEAST
  double scale, softcap, decay;
};

// Several columns of new tokens, decoded one after another. Of `decode`: q, k_new, v_new and lens are those of the first
// column; q_pos (n, S), -1 where a sequence has no token in a column; out (n, S, Hq, value_dim); lse (n, S, Hq). Nothing
// leaves and nothing is scored.
struct DecodeRowsArgs {
  DecodeArgs decode;
  int64_t n_columns, q_row, k_row, v_row;  // strides, from column to column
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
  const float* log_masses;      // (R, N) or null
  int64_t k_dtype, v_dtype;
  int64_t k_region, k_row, v_region, v_row, p_region, p_row, s_region, s_row, m_region, m_row;  // strides
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
  float* log_masses;  // null where the pool has none
  int64_t n_threads;
};

struct PrefillArgs {
  const void *q, *k, *v;  // (Hq, Q, key_dim), (Hkv, N, key_dim), (Hkv, N, value_dim) or null: value_dim is 0
  int64_t q_dtype, k_dtype, v_dtype;
  int64_t q_head, q_row, k_head, k_row, v_head, v_row;  // strides
  const int32_t* q_pos;                                 // (Q,)
  const int32_t* past_pos;                              // (Hkv or 1, n_past), null where there is no past
  int64_t past_row;                                     // stride, 0 where all heads share it
  const float* past_log_masses;                         // (Hkv or 1, n_past) or null: all 0
  int64_t mass_row;                                     // stride, 0 where all heads share it
  const float* sink_logits;                             // (Hq,) or null
  void* out;                                            // (Hq, Q, value_dim), null without values
  float* lse;                                           // (Hq, Q)
  float* sums;                                          // (Hkv, N) or null: column sums
  int64_t n_heads, n_kv_heads, n_queries, n_columns, n_past, key_dim, value_dim;  // n_past: N - Q, or N
  int64_t window, reduce, n_threads;
  int64_t lse_given;  // whether lse is what the probabilities are taken from, not a result: then there are no values
  double scale, softcap;
  double decay;  // factor on the column sums of earlier queries at each query
};

// Attention of every `step`-th position's query to the tokens of its unit that are at least `least` before it: unit u has
// the positions u * unit to (u + 1) * unit - 1. What a token gets is added, as the mean of the query heads of a KV head.
struct UnitSumsArgs {
  const void *q, *k;  // (Hq, Q, dim), (Hkv, N, dim): the last Q of the N tokens have the queries
  const float* lse;   // (Hq, Q): logs of the denominators
  float* sums;        // (Hkv, at least N - first) of the tokens from the unit of the first query on
  int64_t q_dtype, k_dtype;
  int64_t q_head, q_row, k_head, k_row, lse_head, lse_row, sums_head;  // strides
  int64_t n_heads, n_kv_heads, n_queries, n_columns, dim, unit, step, least, window, n_threads;
  double scale, softcap;
};

// Queries that all see the same entries: one of each sequence that shares them.
struct AttendArgs {
  PoolArgs pool;
  const void* q;  // (S, Hq, key_dim)
  int64_t q_dtype, q_seq, q_head;  // strides
  const int32_t* table;            // (Hkv, n)
  int64_t table_row;               // stride
  const int32_t* lens;             // (Hkv,)
  const int64_t* members;          // (n_members,): the sequences that share, each at most once
  void* out;                       // (S, Hq, value_dim): what members have found elsewhere, then all of it
  int64_t out_dtype;
  float* lse;                      // (S, Hq): likewise, -inf where there is nothing yet
  int64_t n_members, n_heads, n_kv_heads, n_threads;
  double scale, softcap;
};

// A decoding step and the runs of entries that some of its sequences share: n_runs AttendArgs follow, of the same
// queries, heads and threads, whose out and lse are not read.
struct SharedDecodeArgs {
  DecodeArgs decode;
  int64_t n_runs;
};

// Products x . y of the entries of each head with the vectors of its sets, of which few things are kept.
struct ScanArgs {
  const void *x, *y;  // (H, N, dim), (H * n_sets, n_others, dim)
  int64_t x_dtype, y_dtype;
  int64_t x_head, x_row, y_head, y_row;  // strides
  int64_t n_heads, n_rows, n_sets, n_others, dim;
  float* sums;          // (H, N): sum of |x . y|
  const float* scales;  // (H, scale_head): 1 / length of each entry, zeros behind the last
  int64_t scale_head;   // stride, whole chunks of columns
  const int32_t* lens;  // (H,): entries that are there
  int32_t* at;          // (H, N, most): which others are alike, the newest first
  float* cosines;       // (H, N, most)
  int64_t most, n_threads;
  double threshold;
};

constexpr int MOST_PARTS = 4;

// With `bits` 4 or 8, w holds codes: see linear/quantized_rows.hpp for them and for `scales`.
struct LinearPart {
  const void *w, *bias, *scales;  // (n, k), (n,) or null, null of plain numbers
  int64_t n, w_row;               // w_row: numbers of a row, or bytes of codes
};

// out_p = norm(x) @ w_p^T + bias_p; with a gate: out_0 = gate(out_0) * out_1, or gate(out_0) of a single part; with a
// residual: out_0 += residual.
struct LinearArgs {
  const void *x, *residual;  // (m, k); (m, n of part 0) or null
  void* out[MOST_PARTS];     // (m, n) of each part, contiguous
  int64_t m, n_threads;
  // From here on the same for all rows that go through these matrices.
  const void *norm, *norm_bias;  // (k,) or null: the weight of a norm of x; (k,) or null
  int64_t k, dtype, gate, n_parts, centred, bits;  // all tensors but codes and scales are of one dtype; bits 0: plain, 12: 4 and 8
  LinearPart parts[MOST_PARTS];
  double eps;
};

// Rows `begin` .. `end` of a quantized matrix as numbers of `dtype`, contiguous.
struct WidenArgs {
  const void *w, *scales;
  void* out;  // (end - begin, k)
  int64_t begin, end, k, bits, dtype, n_threads;
};

// q and k turn in place by the rotary embedding: x * cos + half(x) * sin, where half is (-second half, first half).
struct RotateArgs {
  void *q, *k;                                // (m, heads, >= dim) each; the first dim numbers of a head turn
  const void *cos, *sin;                      // (m, dim)
  int64_t m, q_heads, k_heads, dim, cos_row;
  int64_t q_row, q_head, k_row, k_head;       // strides
  int64_t dtype, n_threads;
};

// Rows into queries, keys and values, of which the first two turn.
struct HeadsArgs {
  LinearArgs into;
  RotateArgs turn;
};

// What follows attention in a layer: x += seen through the first matrix, then x += x through the two others.
struct BehindArgs {
  const void *seen, *x;  // (m, k of the first), (m, n of the first)
  void* out;             // (m, n of the last)
  int64_t m, n_threads;
  LinearArgs steps[3];   // of which only what is the same for all rows is read
};

// RMSNorm, or LayerNorm where `centred`.
struct NormArgs {
  const void *x, *weight, *bias;  // (m, heads, n); (n,); (n,) or null
  void* out;                      // (m, heads, n); may be x
  int64_t m, heads, n, x_row, x_head, out_row, out_head, dtype, centred, n_threads;  // strides
  double eps;
};

// How keys lie inside a block: number c of token t at row_at[t] + column_at[c].
enum KeyOrder : int64_t {
  ANY_ORDER = 0,
  TOKENS_TOGETHER = 1,  // runs of 16 tokens: row_at rises by 1
  PAIRS_TOGETHER = 2,   // runs of 16 tokens of pairs of 16-bit numbers: row_at rises by 2, column_at by 1 inside a pair
};

// One query of each sequence adds its attention to the sums of the entries that it sees: see ops.block_sums.
struct BlockSumsArgs {
  const void *q, *keys;                // (S, Hq, dim), contiguous rows; keys of the first block
  const int32_t *row_at, *column_at;   // (block,), (dim,)
  const int32_t *table, *lens;         // (S, n): block ids; (S,): entries, 0 for a sequence that takes no part
  const float* sink_logits;            // (Hq,) or null
  float* sums;                         // (blocks, Hkv, block)
  int64_t q_dtype, k_dtype, q_seq, q_head, k_block, k_head, table_row;  // strides
  int64_t n_seq, n_heads, n_kv_heads, block, dim, order, reduce, n_threads;
  double scale, softcap, decay;
};

// The largest number of each row and where it stands first; NaN counts as larger than all.
struct LargestArgs {
  const void* x;   // (m, n), contiguous rows
  float* largest;  // (m,)
  int64_t* at;     // (m,)
  int64_t m, n, x_row, dtype, n_threads;
};

// The column that each row draws, by its weights.
struct RaceArgs {
  const float* weights;  // (m, n), at least 0 and finite, contiguous rows
  const int64_t* ids;    // (m, n), what each column is called in the draw; null: its number
  const int64_t* keys;   // (m,)
  int64_t* drawn;        // (m,)
  int64_t m, n, weight_row, id_row, n_threads;
};

// out = act(first half of x) * second half.
struct GateArgs {
  const void* x;  // (m, 2 n), contiguous rows
  void* out;      // (m, n), contiguous
  int64_t m, n, x_row, dtype, act, n_threads;
};

// out = residual + act(norm(x) times the matrix + bias), all of bf16; with `halves` the matrix has 2 n columns, and it is
// act(the first n) * the other n.
struct GemmArgs {
  const void *x, *weight, *bias;     // (m, k), (n or 2 n, k), as many numbers or null; contiguous
  const void *norm, *norm_bias;      // (k,) or null: of the rows of x, RMSNorm, or LayerNorm where `centred`
  const void* residual;              // (m, n), contiguous, or null
  void* out;                         // (m, n), contiguous
  int64_t m, k, n, halves, act, centred, n_threads;  // k: a multiple of 32; act: not GELU; 0 for none
  double eps;
};

// Regions that hold more than their caps merge: see ops.merge_slots and MergeRule on the Python side.
struct MergeArgs {
  PoolArgs pool;
  const int32_t* table;  // (R, n)
  int64_t table_row;
  int32_t* lens;                                // (R,)
  const int32_t *caps, *recent, *q_pos;         // (R,), (R,), (S,)
  double* memory;                               // (S,): thresholds, NaN for none
  const float* local;                           // (R, N) or null
  int64_t local_row, n_seq, n_kv_heads;
  int64_t evict, sinks, seed;
  int64_t weigh, closed, targets, over, average, draw, bias, uses_masses, n_threads;
  double threshold, rate, cover, most;
};

// For each source the target that is most like it. Flags are one byte each.
struct NearestArgs {
  const void *keys, *values;  // (H, N, dim); values null: only keys count
  int64_t k_dtype, v_dtype, k_head, k_row, v_head, v_row;
  const uint8_t *sources, *targets;  // (H, N)
  int64_t* into;                     // (H, N)
  double* alike;                     // (H, N)
  int64_t n_heads, n, key_dim, value_dim, n_threads;
  double floor;  // what is not more alike is none
};

// Rows that go into others, and the means over them.
struct MeanArgs {
  const void* x;  // (H, N, dim)
  int64_t dtype, x_head, x_row;
  const double *weight, *own;  // (H, N)
  const int64_t* into;         // (H, N)
  const uint8_t* leaves;       // (H, N)
  float* out;                  // (H, N, dim)
  int64_t n_heads, n, dim, n_threads;
};

// The entries of some sequences that no rule of their heads keeps leave: see ops.admit.
struct AdmitArgs {
  PoolArgs pool;
  const int32_t* table;  // (R, n)
  int64_t table_row;
  int32_t* lens;             // (R,)
  const int64_t* sequences;  // (n_sequences,)
  const int64_t* ids;        // (S, n): token ids by position
  int64_t ids_row;
  const uint8_t* classes;  // (n_classes,): by token id, the last for all ids beyond
  int64_t n_classes;
  const int64_t* kinds;               // (R,)
  const int32_t* local;               // (R,): newest positions that local heads keep
  const int64_t *seen, *quota, *most;  // (n_sequences,)
  int64_t n_sequences, n_kv_heads, sinks, window;
};

}  // namespace mp
