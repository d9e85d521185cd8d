// One block of query rows: logits, softmax and output, one chunk of columns after the other; then the column sums.
#pragma once

#include <cmath>

#include "prefill/pack.hpp"

namespace mp {

// What a thread needs for a block of at most `most` rows whose weights are held for `held` chunks.
template <class T>
struct Room {
  T *query, *weights;           // (key_pad / DEPTH, most, DEPTH), (most, COLUMNS)
  float *out, *top, *total;     // (most, value_pad), (most,), (most,)
  float* factor;                // (most,)
  float *logits, *chunk_top;    // (held, most, COLUMNS), (held, most)
  int32_t* visited;             // (held,): which chunks these are
  int most;
  uintptr_t end;

  Room(const Prompt<T>& p, int rows, int held, uintptr_t memory) : most(rows) {
    auto take = [&memory](int64_t bytes) { return std::exchange(memory, memory + uintptr_t(round_up(bytes, 64))); };
    auto floats = [&take](int64_t n) { return reinterpret_cast<float*>(take(4 * n)); };
    query = reinterpret_cast<T*>(take(round_up(p.key_pad, DEPTH) * rows * int64_t(sizeof(T))));
    weights = reinterpret_cast<T*>(take(int64_t(rows) * COLUMNS * int64_t(sizeof(T))));
    out = floats(int64_t(rows) * p.value_pad);
    top = floats(rows + W), total = floats(rows + W), factor = floats(rows + W);
    logits = floats(int64_t(held) * rows * COLUMNS);
    chunk_top = floats(int64_t(held) * rows);
    visited = reinterpret_cast<int32_t*>(take(4 * held));
    end = memory;
  }
  static int64_t bytes(const Prompt<T>& p, int rows, int held) {
    return round_up(int64_t(Room(p, rows, held, 0).end), 4096);
  }
};

// A block of rows of one KV head: row i * group + h is query head h of the group for query first + i.
template <class T>
class Block {
 public:
  Block(const Prompt<T>& p, const Packed<T>& packed, const Room<T>& room, int head, int first, int n)
      : p_(p), packed_(packed), r_(room), head_(head), first_(first), queries_(n), n_(n * p.group) {}

  void attend();
  void finish();
  void add_columns(float* sums) const;  // to (columns,): of the weights held; `total` is used up

 private:
  void load_queries();
  void multiply_keys(float* logits, int at, int n);
  void soften(float* logits, int at, int n, int chunk);
  void fade(int r, float before, float added);
  void multiply_values(const float* logits, int at, int n);
  template <bool kMax>
  void add_chunk(const float* weights, float* sums) const;
  bool keeps() const { return p_.a.sums != nullptr; }
  int query_head(int h) const { return head_ * p_.group + h; }

  const Prompt<T>& p_;
  const Packed<T>& packed_;
  const Room<T>& r_;
  const int head_, first_, queries_, n_;
  int held_ = 0;
};

template <class T>
void Block<T>::load_queries() {
  const int panel = r_.most * DEPTH;
  for (int i = 0, r = 0; i < queries_; ++i)
    for (int h = 0; h < p_.group; ++h, ++r)
      for (int d = 0; d < p_.key_dim; d += DEPTH) {
        const int n = std::min(DEPTH, p_.key_dim - d), pad = std::min(DEPTH, p_.key_pad - d);
        load_row(r_.query + d / DEPTH * panel + r * DEPTH, offset(p_.query(query_head(h), first_ + i), p_.a.q_dtype, d),
                 p_.a.q_dtype, n, pad);
      }
}

template <class T>
void Block<T>::multiply_keys(float* logits, int at, int n) {
  for (int c = 0; c < n; c += TILE)
    for (int d = 0; d < p_.key_pad; d += DEPTH)
      multiply(n_, r_.query + int64_t(d) * r_.most, packed_.key(at + c, d), std::min(DEPTH, p_.key_pad - d), n - c,
               logits + c, COLUMNS, d > 0);
}

// Online softmax: logits to weights, and what came before rescaled to the new maximum.
template <class T>
void Block<T>::soften(float* logits, int at, int n, int chunk) {
  const Sight oldest(p_.a.window, p_.a.q_pos[first_]), newest(p_.a.window, p_.a.q_pos[first_ + queries_ - 1]);
  const bool masked = packed_.lowest[chunk] <= newest.after || packed_.highest[chunk] > oldest.upto;
  const float scale = float(p_.a.scale);
  const float* bias = p_.biased() && at < p_.n_past ? packed_.biases + at : nullptr;
  const bool plain = !masked && bias == nullptr && p_.a.softcap == 0 && scale > 0;
  for (int r = 0; r < n_ && !plain; ++r)
    settle_logits(logits + r * COLUMNS, n, scale, float(p_.a.softcap), bias, masked ? packed_.positions + at : nullptr,
                  Sight(p_.a.window, p_.a.q_pos[first_ + r / p_.group]));
  T* weights = sizeof(T) == 4 ? reinterpret_cast<T*>(logits) : r_.weights;
  const float unit = plain ? scale * LOG2_E : 1.0f;
  const bool keep = keeps() && sizeof(T) != 4;
  for (int r = 0; r < n_; r += 4) {
    float *s = logits + r * COLUMNS, *top = r_.top + r, before[4], added[4];
    T* w = weights + r * COLUMNS;
    const int rows = std::min(4, n_ - r);
    std::copy(top, top + rows, before);
    if (rows == 4)
      mp::soften<4>(s, COLUMNS, w, COLUMNS, n, unit, keep, top, added);
    else
      for (int i = 0; i < rows; ++i)
        mp::soften<1>(s + i * COLUMNS, COLUMNS, w + i * COLUMNS, COLUMNS, n, unit, keep, top + i, added + i);
    for (int i = 0; i < rows; ++i) fade(r + i, before[i], added[i]);
  }
}

// What came before a chunk, rescaled to the new maximum, and the weights that the chunk adds.
template <class T>
MP_INLINE void Block<T>::fade(int r, float before, float added) {
  if (before != r_.top[r]) {
    const vf factor = exp2(splat(before - r_.top[r]));
    r_.total[r] *= factor[0];
    float* o = r_.out + r * p_.value_pad;
    for (int d = 0; d < p_.value_pad; d += W) store(o + d, load(o + d) * factor);
  }
  r_.total[r] += added;
}

template <class T>
void Block<T>::multiply_values(const float* logits, int at, int n) {
  const T* weights = sizeof(T) == 4 ? reinterpret_cast<const T*>(logits) : r_.weights;
  for (int d = 0; d < p_.value_dim; d += TILE)
    multiply(n_, weights, packed_.value(at, d), n, p_.value_dim - d, r_.out + d, p_.value_pad, true);
}

template <class T>
void Block<T>::attend() {
  load_queries();
  std::fill(r_.top, r_.top + n_, NOTHING);
  std::fill(r_.total, r_.total + n_, 0.0f);
  std::memset(r_.out, 0, size_t(n_) * size_t(p_.value_pad) * 4);
  const int seen = std::min(p_.n_past + first_ + queries_, int(p_.a.n_columns));
  const Sight oldest(p_.a.window, p_.a.q_pos[first_]), newest(p_.a.window, p_.a.q_pos[first_ + queries_ - 1]);
  for (int chunk = 0, at = 0; at < seen; ++chunk, at += COLUMNS) {
    if (packed_.highest[chunk] <= oldest.after || packed_.lowest[chunk] > newest.upto) continue;
    const int n = int(round_up(std::min(COLUMNS, seen - at), W));
    float* logits = r_.logits + int64_t(held_) * r_.most * COLUMNS;
    multiply_keys(logits, at, n);
    soften(logits, at, n, chunk);
    multiply_values(logits, at, n);
    if (!keeps()) continue;
    for (int r = 0; n < COLUMNS && r < n_; ++r) std::fill(logits + r * COLUMNS + n, logits + (r + 1) * COLUMNS, 0.0f);
    std::copy(r_.top, r_.top + n_, r_.chunk_top + held_ * r_.most);
    r_.visited[held_++] = chunk;
  }
}

// The sink logits, then outputs and log-sum-exp. Leaves 1 / denominator in `total`, 0 for a row that sees nothing.
// A log-sum-exp that is given takes the place of both.
template <class T>
void Block<T>::finish() {
  for (int i = 0, r = 0; i < queries_; ++i)
    for (int h = 0; h < p_.group; ++h, ++r) {
      const int64_t row = query_head(h) * p_.a.n_queries + first_ + i;
      float& top = r_.top[r];
      if (p_.a.lse_given) {
        top = p_.a.lse[row] * LOG2_E, r_.total[r] = 1.0f;
        continue;
      }
      float factor = 1.0f;
      if (p_.a.sink_logits != nullptr) {
        const float sink = p_.a.sink_logits[query_head(h)] * LOG2_E, before = std::exchange(top, std::max(top, sink));
        factor = exp2(splat(before - top))[0];
        r_.total[r] = r_.total[r] * factor + exp2(splat(sink - top))[0];
      }
      p_.a.lse[row] = (top + std::log2(r_.total[r])) / LOG2_E;
      if (r_.total[r] != 0) r_.total[r] = 1.0f / r_.total[r];
      float* o = r_.out + r * p_.value_pad;
      for (int d = 0; d < p_.value_pad; d += W) store(o + d, load(o + d) * (factor * r_.total[r]));
      if (p_.value_dim == 0) continue;
      char* out = static_cast<char*>(p_.a.out) + row * p_.value_dim * dtype_bytes(p_.a.q_dtype);
      narrow(out, p_.a.q_dtype, o, p_.value_dim);
    }
}

// `factor` turns the weights of a chunk into probabilities.
template <class T>
template <bool kMax>
void Block<T>::add_chunk(const float* weights, float* sums) const {
  constexpr int N = 4;
  for (int c = 0; c < COLUMNS; c += N * W) {
    vf added[N] = {};
    for (int r = 0; r < n_;) {
      vf p[N] = {};
      for (const int next = kMax ? r + p_.group : n_; r < next; ++r)
        for (int j = 0; j < N; ++j) {
          const vf x = load(weights + r * COLUMNS + c + j * W) * r_.factor[r];
          p[j] = kMax ? vmax(p[j], x) : p[j] + x;
        }
      for (int j = 0; j < N; ++j) added[j] += p[j];
    }
    for (int j = 0; j < N; ++j) store(sums + c + j * W, load(sums + c + j * W) + added[j]);
  }
}

template <class T>
void Block<T>::add_columns(float* sums) const {
  if (p_.a.decay != 1.0)
    for (int i = 0, r = 0; i < queries_; ++i) {
      const double left = std::pow(p_.a.decay, double(p_.a.n_queries - 1 - first_ - i));
      const float weight = left < 1e-30 ? 0.0f : float(left);  // numbers below the smallest normal ones are slow
      for (int h = 0; h < p_.group; ++h, ++r) r_.total[r] *= weight;
    }
  for (int i = 0; i < held_; ++i) {
    const float* weights = r_.logits + int64_t(i) * r_.most * COLUMNS;
    for (int r = 0; r < n_; r += W)
      store(r_.factor + r, exp2(load(r_.chunk_top + i * r_.most + r) - load(r_.top + r)) * load(r_.total + r));
    float* to = sums + r_.visited[i] * COLUMNS;
    p_.a.reduce == MAX ? add_chunk<true>(weights, to) : add_chunk<false>(weights, to);
  }
}

}  // namespace mp
