// Queries of one KV head over a range of entries that all of them see, chunk by chunk.
//
// Logits lie with the queries side by side: keys are read as they lie in their pages, a step at a time, and meet vectors
// of queries. So the softmax needs no sums across lanes, and only values change their order, once for all queries.
#pragma once

#include "common/softmax.hpp"
#include "decode/shared_prefix_call.hpp"

namespace mp {

// Two rows of TILE numbers as pairs of neighbours; or one row as it is.
MP_INLINE void zip_rows(const float* row, const float*, float* to) { std::memcpy(to, row, TILE * 4); }

// The weights of a vector of queries for STEP entries, as a step takes them.
MP_INLINE void zip_weights(const vf (&w)[1], float* to) { store(to, w[0]); }

#if defined(__AVX512BF16__)
MP_INLINE __m512i zip_halves(__m512i even, __m512i odd, int from) {  // numbers from, from + 1, ... of each
  const __m512i at = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,  //
                                      39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  return _mm512_permutex2var_epi16(even, _mm512_add_epi16(at, _mm512_set1_epi16(short(from))), odd);
}
MP_INLINE void zip_rows(const bf16* even, const bf16* odd, bf16* to) {
  const __m512i x = _mm512_loadu_si512(even), y = _mm512_loadu_si512(odd);
  _mm512_storeu_si512(to, zip_halves(x, y, 0));
  _mm512_storeu_si512(to + TILE, zip_halves(x, y, W));
}
MP_INLINE void zip_weights(const vf (&w)[2], bf16* to) {
  const __m512i even = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh((__m512)w[0]));
  const __m512i odd = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh((__m512)w[1]));
  _mm512_storeu_si512(to, zip_halves(even, odd, 0));
}
#endif

// Rows first .. first + n of a KV head, n <= MOST_ROWS.
template <class T>
class SharedBlock {
 public:
  SharedBlock(const SharedCall<T>& c, const SharedRoom<T>& room, const Found& found, int head, int first, int n)
      : c_(c), r_(room), f_(found), pages_(c.a.table + head * c.a.table_row), head_(head), first_(first), n_(n) {}
  void attend(int begin, int end);  // begin: the first of a chunk

 private:
  static constexpr int STEP = Inner<T>::STEP;

  void load_queries();
  void load_keys(int at, int n);
  void load_values(int at, int n);
  void load_bias(int at, int n);
  const T* keys(int at, int tile) const {
    return c_.keys_in_place ? reinterpret_cast<const T*>(c_.pool.key(pages_, at + tile)) : r_.keys + tile * c_.key_pad;
  }
  Soon nothing() const { return {reinterpret_cast<const char*>(r_.queries), 0}; }
  template <int C>
  void multiply_keys(int at, int n, int first);
  void soften(int n, int first);
  template <int R>
  void multiply_values(int rows, int n, const T* weights, const float* factors, const T* values, Soon soon, float* out);
  void multiply_values(int at, int n, int first, int end);

  const SharedCall<T>& c_;
  const SharedRoom<T>& r_;
  const Found& f_;
  const int32_t* pages_;
  const int head_, first_, n_;
};

template <class T>
void SharedBlock<T>::load_queries() {
  std::memset(r_.queries, 0, size_t(round_up(n_, BLOCK_ROWS)) * size_t(c_.key_pad) * sizeof(T));
  for (int i = 0; i < n_; ++i) {
    SharedCall<T>::load_row(r_.rows, c_.query(head_, first_ + i), c_.a.q_dtype, c_.key_dim, c_.key_pad);
    T* to = r_.queries + int64_t(i / BLOCK_ROWS) * BLOCK_ROWS * c_.key_pad + i % BLOCK_ROWS * STEP;
    for (int d = 0; d < c_.key_pad; d += STEP) std::memcpy(to + int64_t(d) * BLOCK_ROWS, r_.rows + d, 4);
  }
}

template <class T>
void SharedBlock<T>::load_keys(int at, int n) {
  for (int i = 0; i < n && !c_.keys_in_place; ++i)
    SharedCall<T>::load_row(r_.keys + i * c_.key_pad, c_.pool.key(pages_, at + i), c_.pool.dtype, c_.key_dim, c_.key_pad);
}

template <class T>
void SharedBlock<T>::load_values(int at, int n) {
  for (int i = 0; i < n; i += STEP) {
    const T* row[2] = {r_.rows, r_.rows + (STEP - 1) * c_.value_pad};
    for (int j = 0; j < STEP; ++j) {
      if (i + j < n && c_.values_in_place)
        row[j] = reinterpret_cast<const T*>(c_.pool.value(pages_, at + i + j));
      else if (i + j < n)
        SharedCall<T>::load_row(r_.rows + j * c_.value_pad, c_.pool.value(pages_, at + i + j), c_.pool.dtype,
                                c_.value_dim, c_.value_pad);
      else
        std::memset(r_.rows + j * c_.value_pad, 0, size_t(c_.value_pad) * sizeof(T));
    }
    for (int d = 0; d < c_.value_pad; d += TILE)
      zip_rows(row[0] + d, row[1] + d, r_.values + int64_t(d) * CHUNK_KEYS + i * TILE);
  }
}

template <class T>
void SharedBlock<T>::load_bias(int at, int n) {
  for (int i = 0; i < n && c_.pool.masses; ++i) r_.bias[i] = *c_.pool.log_mass(pages_, at + i) * LOG2_E;
}

// Logits of a chunk for the block of rows from `first` on. Its values are read next.
template <class T>
template <int C>
void SharedBlock<T>::multiply_keys(int at, int n, int first) {
  const T* queries = r_.queries + int64_t(first) * c_.key_pad;
  const int steps = c_.key_pad / STEP;
  const int64_t bytes = OUTER * c_.value_dim * c_.pool.item / steps;
  for (int tile = 0; tile < n; tile += OUTER) {
    const Soon soon = first == 0 ? Soon{c_.pool.value(pages_, at + tile), bytes} : nothing();
    set_products<T, OUTER, C>(keys(at, tile), c_.key_pad, STEP, queries, BLOCK_ROWS * STEP, steps, soon,
                              r_.logits + tile * BLOCK_ROWS, BLOCK_ROWS);
  }
}

// Online softmax: logits to weights, tops and sums brought up to date, `factors` for what came before.
template <class T>
void SharedBlock<T>::soften(int n, int first) {
  const float scale = float(c_.a.scale), cap = float(c_.a.softcap);
  const bool plain = cap == 0 && !c_.pool.masses && scale > 0;
  const vf unit = splat(plain ? scale * LOG2_E : 1.0f);
  for (int c = 0; c < BLOCK_ROWS && first + c < n_; c += W) {
    float* s = r_.logits + c;
    for (int i = 0; i < n && !plain; ++i) {
      const vf x = load(s + i * BLOCK_ROWS);
      const vf logit = cap != 0 ? tanh(x * (scale / cap)) * (cap * LOG2_E) : x * (scale * LOG2_E);
      store(s + i * BLOCK_ROWS, c_.pool.masses ? logit + r_.bias[i] : logit);
    }
    vf best = load(s);
    for (int i = 1; i < n; ++i) best = vmax(load(s + i * BLOCK_ROWS), best);
    const vf before = load(f_.top + first + c), top = vmax(best * unit, before), factor = exp2(before - top);
    vf total = load(f_.total + first + c) * factor;
    for (int i = 0; i < n; i += STEP) {
      vf w[STEP];
      for (int j = 0; j < STEP; ++j) {
        w[j] = i + j < n ? exp2(load(s + (i + j) * BLOCK_ROWS) * unit - top) : vf{};
        total += w[j];
      }
      zip_weights(w, r_.weights + i * BLOCK_ROWS + c * STEP);
    }
    store(f_.top + first + c, top), store(f_.total + first + c, total), store(r_.factors + c, factor);
  }
}

template <class T>
template <int R>
void SharedBlock<T>::multiply_values(int rows, int n, const T* weights, const float* factors, const T* values,
                                     Soon soon, float* out) {
  if constexpr (R > 1)
    if (rows < R) return multiply_values<R - 1>(rows, n, weights, factors, values, soon, out);
  fade_products<T, R, 2>(weights, STEP, BLOCK_ROWS * STEP, values, TILE * STEP, (n + STEP - 1) / STEP,
                         soon, factors, out, c_.value_pad);
}

// Weights of a chunk times its values, on top of what came before. The keys of the next chunk are read next.
template <class T>
void SharedBlock<T>::multiply_values(int at, int n, int first, int end) {
  const int rows = std::min(BLOCK_ROWS, n_ - first), steps = (n + STEP - 1) / STEP;
  const int tiles = (rows + OUTER - 1) / OUTER * (c_.value_pad / TILE), share = (CHUNK_KEYS + tiles - 1) / tiles;
  int next = at + CHUNK_KEYS;
  for (int d = 0; d < c_.value_pad; d += TILE)
    for (int r = 0; r < rows; r += OUTER, next += share) {
      const bool more = first == 0 && next < end;
      const Soon soon = more ? Soon{c_.pool.key(pages_, next), share * c_.key_dim * c_.pool.item / steps} : nothing();
      multiply_values<OUTER>(rows - r, n, r_.weights + r * STEP, r_.factors + r, r_.values + int64_t(d) * CHUNK_KEYS, soon,
                             f_.out + int64_t(first + r) * c_.value_pad + d);
    }
}

template <class T>
void SharedBlock<T>::attend(int begin, int end) {
  const int padded = int(round_up(n_, BLOCK_ROWS));
  std::memset(f_.out, 0, size_t(n_) * size_t(c_.value_pad) * 4);
  std::fill(f_.top, f_.top + padded, NOTHING);
  std::fill(f_.total, f_.total + padded, 0.0f);
  load_queries();
  for (int at = begin; at < end; at += CHUNK_KEYS) {
    const int n = std::min(CHUNK_KEYS, end - at);
    load_keys(at, n);
    load_bias(at, n);
    for (int first = 0; first < n_; first += BLOCK_ROWS) {
      n_ - first > W ? multiply_keys<2>(at, n, first) : multiply_keys<1>(at, n, first);
      soften(n, first);
      if (first == 0) load_values(at, n);
      multiply_values(at, n, first, end);
    }
  }
}

}  // namespace mp
