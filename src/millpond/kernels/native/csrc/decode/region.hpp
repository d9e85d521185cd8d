// What one decode call knows, and the memory that one region needs while it is worked on.
#pragma once

#include <utility>

#include "common/workspace.hpp"
#include "quantized/packed.hpp"

namespace mp {

constexpr int CHUNK = 512;    // slots whose logits are held at once: keys and values are read in streams of this length
constexpr int SPLIT = 1024;   // slots per work item: fixed, so that results do not depend on the threads
constexpr float LOW = -1e30f;  // the maximum over nothing: finite, so that differences stay finite

// Some of a region's entries: those in plain pages, or those in packed ones.
struct Part {
  const Pool* pool;
  const int32_t* pages;
  int lens;          // slots in use
  int first_split;   // splits of the parts before it
  bool holes;        // whether some of its slots hold no entry: position -1
};

// Which of the region's chunks begins at slot `at` of a part.
inline int64_t chunk_of(const Part& part, int at) { return int64_t(part.first_split) * (SPLIT / CHUNK) + at / CHUNK; }

// The call: arguments and what follows from them.
struct Call {
  const DecodeArgs& a;
  const PackedArgs* packed;  // null where the regions have no packed part
  Pool pool;
  Pool packed_pool;
  int group, n_regions, out_stride, most;  // out_stride: floats per row of a partial output; most: longest region
  bool gathers;                            // whether a signal is written

  explicit Call(const DecodeArgs& args, const PackedArgs* packed_args = nullptr)
      : a(args), packed(packed_args), pool(args.pool), packed_pool(packed != nullptr ? packed->pool : args.pool), group(int(args.n_heads / args.n_kv_heads)), n_regions(int(args.n_seq * args.n_kv_heads)),
        out_stride(int(round_up(args.pool.value_dim, W))), most(0), gathers(args.signal != NO_SIGNAL) {
    for (int r = 0; r < n_regions; ++r)
      if (active(r)) most = std::max(most, packed_lens(r) > 0 ? plain_splits(r) * SPLIT + packed_lens(r) : int(a.lens[r]));
  }
  int seq(int r) const { return r / int(a.n_kv_heads); }
  int head(int r) const { return r % int(a.n_kv_heads); }
  int query_head(int r) const { return head(r) * group; }
  int position(int r) const { return a.q_pos[seq(r)]; }
  bool active(int r) const { return position(r) >= 0; }
  const int32_t* pages(int r) const { return a.table + r * a.table_row; }
  int packed_lens(int r) const { return packed != nullptr ? packed->lens[r] : 0; }
  int plain_splits(int r) const { return active(r) ? std::max(1, (a.lens[r] + SPLIT - 1) / SPLIT) : 1; }
  int splits(int r) const { return plain_splits(r) + (active(r) ? (packed_lens(r) + SPLIT - 1) / SPLIT : 0); }
  Part plain_part(int r) const { return {&pool, pages(r), int(a.lens[r]), 0, false}; }
  Part packed_part(int r) const {
    return {&packed_pool, packed->table + r * packed->table_row, packed_lens(r), plain_splits(r), packed->dead[r] > 0};
  }
  // The part that split number `split` reads.
  Part part(int r, int split) const { return split < plain_splits(r) ? plain_part(r) : packed_part(r); }
  int stored(int r) const { return a.lens[r] + packed_lens(r) - (packed != nullptr ? packed->dead[r] : 0); }
  bool full(int r) const { return active(r) && a.evict != NEVER && stored(r) >= a.caps[r]; }
  const void* query(int r, int h) const {
    return offset(a.q, a.q_dtype, seq(r) * a.q_seq + (query_head(r) + h) * a.q_head);
  }
  const void* new_key(int r) const { return offset(a.k_new, a.k_dtype, seq(r) * a.k_seq + head(r) * a.k_head); }
  const void* new_value(int r) const { return offset(a.v_new, a.v_dtype, seq(r) * a.v_seq + head(r) * a.v_head); }
};

constexpr int PACKED = 1 << 30;  // slot i of a region's packed part is slot PACKED + i of the region

// The entry that leaves: lowest value, then oldest, then lowest slot.
struct Victim {
  float value = __builtin_inff();
  int32_t position = INT32_MAX;
  int32_t slot = INT32_MAX;

  void consider(float v, int32_t p, int32_t s) {
    if (v < value || (v == value && (p < position || (p == position && s < slot)))) *this = {v, p, s};
  }
};

// Buffers of one region: per split the partial softmax, per chunk the unnormalised probabilities.
struct Slab {
  float *top, *total, *out;    // (splits, group), (splits, group), (splits, group, out_stride)
  float *weights, *chunk_top;  // (chunks, group, CHUNK), (chunks, group): only where a signal is gathered
  float *final_top, *inverse;  // (group,): the maximum and 1 / denominator of the whole region
  Victim* victims;             // (splits,)

  static int64_t splits(const Call& c) { return std::max<int64_t>(1, (c.most + SPLIT - 1) / SPLIT); }
  static int64_t chunks(const Call& c) { return c.gathers ? (c.most + CHUNK - 1) / CHUNK : 0; }
  static int64_t bytes(const Call& c) {
    const int64_t n = splits(c) * c.group * (2 + c.out_stride) + chunks(c) * c.group * (CHUNK + 1) + 2 * c.group + 8 * W;
    return round_up(4 * n + splits(c) * int64_t(sizeof(Victim)), 4096);
  }
  Slab(const Call& c, char* memory) {
    float* p = reinterpret_cast<float*>(memory);
    auto take = [&p](int64_t n) { return std::exchange(p, p + n); };
    weights = take(chunks(c) * c.group * CHUNK + W);
    out = take(splits(c) * c.group * c.out_stride);
    chunk_top = take(chunks(c) * c.group + W);
    top = take(splits(c) * c.group);
    total = take(splits(c) * c.group);
    final_top = take(c.group);
    inverse = take(c.group);
    victims = reinterpret_cast<Victim*>(p);
  }
};

}  // namespace mp
