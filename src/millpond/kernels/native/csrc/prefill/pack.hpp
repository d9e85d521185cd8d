// One prefill call, and the keys and values of one KV head laid out for `multiply`.
#pragma once

#include <algorithm>
#include <utility>

#include "common/pages.hpp"
#include "common/softmax.hpp"
#include "common/transpose.hpp"
#include "common/workspace.hpp"
#include "prefill/tile.hpp"

namespace mp {

constexpr int COLUMNS = DEPTH;  // per chunk: columns whose logits are made at once

// Arguments and what follows from them. T: the type in which numbers are multiplied.
template <class T>
struct Prompt {
  static constexpr int STEP = Inner<T>::STEP;
  static constexpr int64_t DTYPE = sizeof(T) == 4 ? int64_t(F32) : int64_t(BF16);
  const PrefillArgs& a;
  int group, n_past, chunks, columns;      // columns: whole chunks of them
  int key_dim, key_pad, value_dim, value_pad;

  explicit Prompt(const PrefillArgs& args)
      : a(args), group(int(args.n_heads / args.n_kv_heads)), n_past(int(args.n_past)),
        chunks(int((args.n_columns + COLUMNS - 1) / COLUMNS)), columns(chunks * COLUMNS), key_dim(int(args.key_dim)),
        key_pad(int(round_up(key_dim, STEP))), value_dim(int(args.value_dim)),
        value_pad(int(round_up(value_dim, TILE))) {}

  const void* query(int head, int64_t row) const { return offset(a.q, a.q_dtype, head * a.q_head + row * a.q_row); }
  const void* key(int head, int64_t row) const { return offset(a.k, a.k_dtype, head * a.k_head + row * a.k_row); }
  const void* value(int head, int64_t row) const { return offset(a.v, a.v_dtype, head * a.v_head + row * a.v_row); }
  int32_t position(int head, int column) const {
    if (column >= int(a.n_columns)) return NOWHERE;
    if (column >= n_past) return a.q_pos[column - n_past];
    const int32_t p = a.past_pos[head * a.past_row + column];
    return p < 0 ? NOWHERE : p;
  }
  bool biased() const { return a.past_log_masses != nullptr; }
  // The log mass in units of log 2 of a column that somebody sees.
  float bias(int head, int column) const {
    return column < n_past ? a.past_log_masses[head * a.mass_row + column] * LOG2_E : 0.0f;
  }
};

// The columns of one KV head. What nobody sees is zero, whatever the caller's memory holds.
template <class T>
struct Packed {
  static constexpr int STEP = Inner<T>::STEP;
  T* keys;                     // (columns / TILE, key_pad / STEP, TILE, STEP)
  T* values;                   // (value_pad / TILE, columns / STEP, TILE, STEP)
  int32_t* positions;          // (columns,)
  int32_t *lowest, *highest;   // (chunks,): of the positions
  float* biases;               // (columns,): see Prompt::bias; null where there are no masses
  int key_pad, columns;

  static int64_t bytes(const Prompt<T>& p) {
    const int64_t numbers = int64_t(p.columns) * (p.key_pad + p.value_pad);
    const int64_t sides = int64_t(p.columns) * (p.biased() ? 2 : 1) + 2 * round_up(p.chunks, 16);
    return round_up(numbers * int64_t(sizeof(T)) + 4 * sides, 64);
  }
  Packed(const Prompt<T>& p, char* memory) : key_pad(p.key_pad), columns(p.columns) {
    auto take = [&memory](int64_t bytes) { return std::exchange(memory, memory + bytes); };
    keys = reinterpret_cast<T*>(take(int64_t(columns) * key_pad * int64_t(sizeof(T))));
    values = reinterpret_cast<T*>(take(int64_t(columns) * p.value_pad * int64_t(sizeof(T))));
    positions = reinterpret_cast<int32_t*>(take(4 * columns));
    lowest = reinterpret_cast<int32_t*>(take(4 * round_up(p.chunks, 16)));
    highest = reinterpret_cast<int32_t*>(take(4 * round_up(p.chunks, 16)));
    biases = p.biased() ? reinterpret_cast<float*>(memory) : nullptr;
  }
  // Columns at, at + 1, ... of a whole tile; `depth` numbers of each from `from` on.
  T* key(int at, int from) const { return keys + int64_t(at) * key_pad + from * TILE; }
  // Value numbers d, d + 1, ... of a whole tile; rows from `at` on.
  T* value(int at, int d) const { return values + int64_t(d) * columns + at * TILE; }
};

// One row as T, padded with zeros to `pad` numbers.
template <class T>
inline void load_row(T* to, const void* from, int64_t dtype, int dim, int pad) {
  copy_row(to, Prompt<T>::DTYPE, from, dtype, dim);
  std::memset(to + dim, 0, size_t(pad - dim) * sizeof(T));
}

// STEP rows of TILE numbers, neighbours of a column side by side.
inline void interleave(const float* rows, int, float* to) { std::memcpy(to, rows, TILE * 4); }
inline void interleave(const bf16* rows, int pad, bf16* to) {
  for (int c = 0; c < TILE; ++c) {
    const uint32_t pair = uint32_t(rows[c].bits) | uint32_t(rows[pad + c].bits) << 16;
    std::memcpy(to + 2 * c, &pair, 4);
  }
}

// Pack chunk `chunk` of a head. `rows`: room for TILE keys and for STEP values.
template <class T>
void pack_chunk(const Prompt<T>& p, const Packed<T>& packed, int head, int chunk, T* rows) {
  constexpr int STEP = Inner<T>::STEP;
  const int begin = chunk * COLUMNS, end = begin + COLUMNS;
  int32_t low = INT32_MAX, high = NOWHERE;
  for (int i = begin; i < end; ++i) {
    const int32_t at = packed.positions[i] = p.position(head, i);
    low = std::min(low, at), high = std::max(high, at);
  }
  packed.lowest[chunk] = low, packed.highest[chunk] = high;
  for (int i = begin; p.biased() && i < end; ++i)
    packed.biases[i] = packed.positions[i] != NOWHERE ? p.bias(head, i) : 0.0f;
  auto load_key = [&](T* to, int i) {
    if (packed.positions[i] != NOWHERE) return load_row(to, p.key(head, i), p.a.k_dtype, p.key_dim, p.key_pad);
    std::memset(to, 0, size_t(p.key_pad) * sizeof(T));
  };
  auto load_value = [&](T* to, int i) {
    if (packed.positions[i] != NOWHERE) return load_row(to, p.value(head, i), p.a.v_dtype, p.value_dim, p.value_pad);
    std::memset(to, 0, size_t(p.value_pad) * sizeof(T));
  };
  const int used = std::min(end, int(round_up(p.a.n_columns, TILE)));
  for (int i = begin; i < used; i += TILE) {
    for (int c = 0; c < TILE; ++c) load_key(rows + c * p.key_pad, i + c);
    transpose(rows, packed.key(i, 0), TILE, p.key_pad / STEP);
  }
  for (int i = begin; p.value_dim > 0 && i < used; i += STEP) {
    for (int c = 0; c < STEP; ++c) load_value(rows + c * p.value_pad, i + c);
    for (int d = 0; d < p.value_pad; d += TILE) interleave(rows + d, p.value_pad, packed.value(i, d));
  }
}

}  // namespace mp
