// One call of attention to shared entries, and the room that a thread needs for it.
#pragma once

#include <algorithm>
#include <utility>

#include "common/pages.hpp"
#include "common/workspace.hpp"
#include "prefill/outer.hpp"

namespace mp {

constexpr int CHUNK_KEYS = 128;   // entries whose logits are made at once
constexpr int BLOCK_ROWS = TILE;  // queries that meet a chunk at once
constexpr int MOST_ROWS = 256;    // queries of a unit of work, at most: whole blocks

// Arguments and what follows from them. T: the type in which numbers are multiplied. A row is one query head of a KV
// head's group for one member.
template <class T>
struct SharedCall {
  static constexpr int STEP = Inner<T>::STEP;
  static constexpr int64_t DTYPE = sizeof(T) == 4 ? int64_t(F32) : int64_t(BF16);
  const AttendArgs& a;
  const Pool pool;
  int group, rows, key_dim, key_pad, value_dim, value_pad;
  bool keys_in_place, values_in_place;  // whether rows are multiplied where they lie in their pages

  explicit SharedCall(const AttendArgs& args)
      : a(args), pool(args.pool), group(int(args.n_heads / args.n_kv_heads)), rows(int(args.n_members) * group),
        key_dim(int(pool.key_dim)), key_pad(int(round_up(key_dim, STEP))), value_dim(int(pool.value_dim)),
        value_pad(int(round_up(value_dim, TILE))),
        keys_in_place(pool.dtype == DTYPE && key_pad == key_dim && pool.slots >= OUTER),
        values_in_place(pool.dtype == DTYPE && value_pad == value_dim) {}

  // Which of the (S, Hq) queries a row is.
  int64_t member(int row) const { return a.members[row / group]; }
  int64_t query_head(int head, int row) const { return int64_t(head) * group + row % group; }
  const void* query(int head, int row) const {
    return offset(a.q, a.q_dtype, member(row) * a.q_seq + query_head(head, row) * a.q_head);
  }
  int64_t result(int head, int row) const { return member(row) * a.n_heads + query_head(head, row); }

  // n numbers as T, padded with zeros.
  static void load_row(T* to, const void* from, int64_t dtype, int n, int pad) {
    copy_row(to, DTYPE, from, dtype, n);
    std::memset(to + n, 0, size_t(pad - n) * sizeof(T));
  }
};

// What rows find in a range of entries: values times weights 2^(logit - top), and the sums of the weights. Logits and
// tops are in units of log 2.
struct Found {
  float *out, *top, *total;  // (rows, value_pad), (rows,), (rows,)

  Found(int rows, int value_pad, char* memory)
      : out(reinterpret_cast<float*>(memory)), top(out + int64_t(rows) * value_pad), total(top + rows) {}
  static int64_t bytes(int rows, int value_pad) { return round_up(int64_t(rows) * (value_pad + 2) * 4, 64); }
};

// Arrays of one thread. What a step takes of STEP neighbours lies side by side.
template <class T>
struct SharedRoom {
  T* queries;      // (blocks, key_pad / STEP, BLOCK_ROWS, STEP)
  T* keys;         // (CHUNK_KEYS, key_pad), for keys that are not multiplied in place
  T* values;       // (value_pad / TILE, CHUNK_KEYS / STEP, TILE, STEP)
  T* weights;      // (CHUNK_KEYS / STEP, BLOCK_ROWS, STEP)
  T* rows;         // one query, or STEP values
  float* logits;   // (CHUNK_KEYS, BLOCK_ROWS)
  float* factors;  // (BLOCK_ROWS,): what came before a chunk fades by
  float* bias;     // (CHUNK_KEYS,): log masses in units of log 2
  uintptr_t end;

  SharedRoom(const SharedCall<T>& c, int n_rows, uintptr_t memory) {
    auto take = [&memory](int64_t bytes) { return std::exchange(memory, memory + uintptr_t(round_up(bytes, 64))); };
    auto numbers = [&take](int64_t n) { return reinterpret_cast<T*>(take(n * int64_t(sizeof(T)))); };
    auto floats = [&take](int64_t n) { return reinterpret_cast<float*>(take(4 * n)); };
    queries = numbers(round_up(n_rows, BLOCK_ROWS) * c.key_pad);
    keys = numbers(c.keys_in_place ? 0 : int64_t(CHUNK_KEYS) * c.key_pad);
    values = numbers(int64_t(CHUNK_KEYS) * c.value_pad);
    weights = numbers(int64_t(CHUNK_KEYS) * BLOCK_ROWS);
    rows = numbers(std::max(c.key_pad, SharedCall<T>::STEP * c.value_pad));
    logits = floats(int64_t(CHUNK_KEYS) * BLOCK_ROWS);
    factors = floats(BLOCK_ROWS);
    bias = floats(CHUNK_KEYS);
    end = memory;
  }
  static int64_t bytes(const SharedCall<T>& c, int n_rows) {
    return round_up(int64_t(SharedRoom(c, n_rows, 0).end), 4096);
  }
};

}  // namespace mp
