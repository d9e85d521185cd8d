// Arguments of the codec `transform`, packed by native/transform.py in this order, and the parts of its pages.
#pragma once

#include "common/args.hpp"

namespace mp {

constexpr int TOKENS = 32;       // of a page
constexpr int PAGE_HEADER = 16;  // bytes
constexpr int MOST_BITS = 7;     // of a number
constexpr int LEVELS = 254;      // of a set of tables, 2 + 4 + ... + 128

// How the numbers of a layer's keys or values are coded: a number z of dimension i is scale[i] * level + shift[i], its
// level one of the 2^bits[i] of table `bits[i]` of the dimension's set.
struct CodedSide {
  const float *shift, *scale;  // (rows,)
  const uint8_t* bits;         // (rows,) 0 to 7
  const float* levels;         // (sets, LEVELS): each the tables of 1, 2, ... 7 bits, ascending
  const int32_t* sets;         // (rows,) which of the sets; null: the first
  int64_t rows;
};

// Where numbers of a token become those of another basis: x = start + sum over i of z[i] * matrix[i].
struct BackTransform {
  CodedSide coded;
  const float* mean;    // (d,)
  const float* matrix;  // (rows, d), contiguous
  void* out;            // (32 n_pages, d)
  int64_t out_row, d;
};

struct DecodePagesArgs {
  BackTransform sides[2];  // keys, values
  const uint8_t* pages;    // (n_pages, page_bytes), checked
  int64_t n_pages, page_bytes, dtype, n_threads;
};

struct NumbersOfSide {
  CodedSide coded;
  const float* z;  // (32 n_pages, rows)
  int64_t z_row, z_column;
};

struct EncodePagesArgs {
  NumbersOfSide sides[2];
  uint8_t* pages;  // (n_pages, page_bytes)
  int64_t n_pages, page_bytes, unit, layer, first, n_threads;
};

// z = matrix (x - mean), written by dimension: number i of token t at z[i * z_row + t].
struct ProjectArgs {
  const void* x;  // (n, d), contiguous rows
  int64_t dtype, x_row;
  const float *mean, *matrix;  // (d,), (rows, d), contiguous
  const uint8_t* bits;         // (rows,): a dimension without any is not written; null: all are
  float* z;
  int64_t z_row, n, rows, d, n_threads;
};

// Both one after the other, some pages at a time; `z` of either is not given, nor `bits` of the tokens.
struct EncodeTokensArgs {
  ProjectArgs tokens[2];
  EncodePagesArgs pages;
};

// Whether pages are whole, and where they belong: the first that is not, -1 for none.
struct CheckPagesArgs {
  const uint8_t* pages;  // (n_pages, page_bytes)
  int64_t n_pages, page_bytes, unit, layer, first;
  int64_t* found;  // (2,): damaged, elsewhere
};

// The first level of dimension i.
inline const float* levels_of(const CodedSide& side, int64_t i) {
  const int64_t set = side.sets == nullptr ? 0 : side.sets[i];
  return side.levels + set * LEVELS + ((1 << side.bits[i]) - 2);
}

// Each returns 1 if there is no memory.
int project(const ProjectArgs& args);
int encode_pages(const EncodePagesArgs& args);

// How many pages are projected together: their tokens stay close.
inline int64_t pages_together(int64_t d) {
  constexpr int64_t BYTES = 512 * 1024;
  const int64_t pages = BYTES / (d * TOKENS * 4);
  return pages > 1 ? pages : 1;
}

// Threads for some products and sums: waking one is worth a few.
inline int threads_for(int64_t products, int64_t most) {
  constexpr int64_t PER_THREAD = 1 << 20;
  const int64_t useful = 1 + products / PER_THREAD;
  return int(useful < most ? useful : most);
}

}  // namespace mp
