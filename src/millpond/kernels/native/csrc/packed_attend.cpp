// Attention of one region's queries over a range of its packed slots: as `attend`, with codes in place of numbers.
#include "packed_attend.hpp"

#include "packed_values.hpp"
#include "turned_keys.hpp"

namespace mp {
namespace {

// The queries of region r as its packed keys meet them: the channels that are kept, times the balance.
void load_packed_queries(const Call& c, int r, int stride, float* to, float* row) {
  const int kept = int(c.packed_pool.key_dim);
  const int32_t* channels = c.packed->channels != nullptr ? c.packed->channels + int64_t(r) * kept : nullptr;
  const float* balance = c.packed->balance != nullptr ? c.packed->balance + int64_t(r) * kept : nullptr;
  std::memset(to, 0, size_t(c.group) * size_t(stride) * 4);
  for (int h = 0; h < c.group; ++h, to += stride) {
    widen(row, c.query(r, h), c.a.q_dtype, int(c.pool.key_dim));
    for (int d = 0; d < kept; ++d) to[d] = row[channels != nullptr ? channels[d] : d];
    for (int d = 0; balance != nullptr && d < kept; ++d) to[d] *= balance[d];
  }
}

constexpr int LEAD = 2 * RUN;  // slots between what is worked on and what is asked for

// What is read LEAD slots after the keys of slot at + i, in a chunk of n slots: keys, then the chunk's values.
const char* later_keys(const PackedPool& packed, const Part& part, int at, int n, int i) {
  const int next = i + LEAD;
  return next < n ? packed.keys(part.pages, at + next) : packed.values(part.pages, at + std::min(next - n, n - 1) / RUN * RUN);
}

// The same of values: values, then the keys of the next chunk.
const char* later_values(const PackedPool& packed, const Part& part, int at, int n, int i) {
  const int next = i + LEAD;
  if (next < n) return packed.values(part.pages, at + next);
  return packed.keys(part.pages, std::min(at + n + (next - n) / RUN * RUN, part.lens - 1));
}

// Ask for the scales, the zeros and what lies beside the codes of the page that holds slot `slot`. Always inlined: GCC
// drops calls of a function that only prefetches.
MP_INLINE void prefetch_factors(const PackedPool& packed, const SideArgs& a, const int32_t* pages, int64_t slot) {
  if (a.scales < 0) return;
  const char* begin = packed.page(pages, slot) + a.scales;
  for (const char* p = begin; p < begin + a.factor_bytes; p += 64) prefetch<64>(p);
}

// Logits of slots at .. at + n of a part, 32 at a time.
template <int F>
void packed_logits(const Call& c, int r, const Part& part, int at, int n, const Scratch& scratch, float* weights) {
  const PackedPool packed(*c.packed);
  const SideArgs& a = c.packed->key;
  const int group = c.group, dim = int(packed.pool.key_dim), slots = int(packed.pool.slots);
  const Folded q{scratch.packed_query, reinterpret_cast<Weight*>(scratch.folded), scratch.packed_bias,
                 int(round_up(dim, QUERY_PAD))};
  const Table table = Table::of<F>(a.table);
  const float offset = offset_of(F);
  const bool fixed = a.fixed_scales != nullptr;
  const int groups = a.by_channel ? 1 : int(dim / a.group);
  if (!a.by_channel) fold_slotwise(offset + half_of(a), dim, int(a.group), groups, group, q);
  if (fixed) {
    const int64_t row = int64_t(c.head(r)) * dim;
    fold_channels({a.fixed_scales + row, a.fixed_zeros + row, true, false, 0.0f}, offset, dim, group, q);
  }
  for (int i = 0; i < n; i += RUN) {
    const int slot = (at + i) & (slots - 1);
    const char* page = packed.page(part.pages, at + i);
    const char* later = later_keys(packed, part, at, n, i);
    if (i == 0) prefetch_factors(packed, packed.a.value, part.pages, at);
    if (slot == 0 && at + i + slots < part.lens) prefetch_factors(packed, a, part.pages, at + i + slots);
    const KeyRun run = key_run<F>(packed, page, slot, later);
    float* s = weights + i;
    if (!a.by_channel) {
      const f16* scales = halves(page, a.scales) + slot;
      const f16* zeros = a.zeros >= 0 ? halves(page, a.zeros) + slot : nullptr;
      const auto go = [&](auto heads, int h) {
        slotwise_logits<F, heads>(run, q, h, scales, zeros, slots, int(a.group), groups, table, s, CHUNK);
      };
      for_heads(group, go);
    } else {
      if (!fixed && (i == 0 || (at + i) % a.group == 0)) {
        const char* scales = page + a.scales + (F == FP8 ? 0 : slot / a.group * dim * 2);
        const char* zeros = a.zeros >= 0 ? page + a.zeros + slot / a.group * dim * 2 : nullptr;
        fold_channels({scales, zeros, F == FP8, F == FP8, half_of(a)}, offset, dim, group, q);
      }
      const auto go = [&](auto heads, int h) { folded_logits<F, heads>(run, q, h, table, s, CHUNK); };
      for_heads(group, go);
    }
    if (a.n_extra > 0) extra_logits(a, page, slot, RUN, q, group, s, CHUNK);
  }
}

// The same of keys that are stored as rows of bf16.
void row_logits(const Call& c, const Part& part, int at, int n, const Scratch& scratch, float* weights) {
  using Q = Lane<bf16>::Q;
  const PackedPool packed(*c.packed);
  const int dim = int(packed.pool.key_dim), stride = int(round_up(dim, QUERY_PAD));
  Q* query = reinterpret_cast<Q*>(scratch.folded);
  narrow(query, sizeof(Q) == 2 ? BF16 : F32, scratch.packed_query, c.group * stride);
  for (int i = 0; i < n; i += RUN) {
    const bf16* keys = reinterpret_cast<const bf16*>(packed.keys(part.pages, at + i));
    const char* later = later_keys(packed, part, at, n, i);
    dot_run<bf16>(keys, RUN, dim, query, stride, c.group, weights + i, CHUNK, later);
  }
}

// Add the values of slots at .. at + n of a part, weighted, to the output.
template <int F>
void packed_sums(const Call& c, const Part& part, int at, int n, const Scratch& scratch, const float* weights, float* out) {
  const PackedPool packed(*c.packed);
  const SideArgs& a = c.packed->value;
  const int group = c.group, dim = int(packed.pool.value_dim), slots = int(packed.pool.slots);
  const int per_group = F == FP8 ? dim : int(a.group), groups = dim / per_group, tiles = per_group / LANES;
  const Table table = Table::of<F>(a.table);
  const float offset = offset_of(F);
  const int bias_stride = groups * W;
  std::memset(scratch.packed_bias, 0, size_t(group) * size_t(bias_stride) * 4);
  for (int i = 0; i < n; i += RUN) {
    const int slot = (at + i) & (slots - 1);
    const char* page = packed.page(part.pages, at + i);
    const char* later = later_values(packed, part, at, n, i);
    if (slot == 0 && at + i + slots < part.lens) prefetch_factors(packed, a, part.pages, at + i + slots);
    const ValueRun run = value_run<F>(packed, page, slot, later);
    for (int g = 0; g < groups; ++g) {
      const char* scales = page + a.scales + (F == FP8 ? 0 : 2 * g * slots);
      const char* zeros = a.zeros >= 0 ? page + a.zeros + 2 * g * slots : nullptr;
      const Folds folds{reinterpret_cast<Weight*>(scratch.folded), scratch.packed_bias + g * W};
      fold_slots(weights + i, CHUNK, n - i, {scales, zeros, F == FP8, F == FP8, half_of(a)}, slot, offset, group,
                 bias_stride, folds);
      const auto go = [&](auto heads, int h) {
        value_heads<F, heads>(run, g * tiles, (g + 1) * tiles, folds.weights + h * RUN, table, out + h * c.out_stride,
                              c.out_stride);
      };
      for_heads(group, go);
    }
    if (a.n_extra > 0) extra_values(a, page, slot, std::min(RUN, n - i), weights + i, CHUNK, group, out, c.out_stride);
  }
  for (int h = 0; h < group; ++h)
    for (int g = 0; g < groups; ++g) {
      const float bias = sum(load(scratch.packed_bias + h * bias_stride + g * W));
      for (int d = g * per_group; d < (g + 1) * per_group; d += W)
        store(out + h * c.out_stride + d, load(out + h * c.out_stride + d) + bias);
    }
}

// The same of values that are stored as rows of bf16.
void row_sums(const Call& c, const Part& part, int at, int n, const float* weights, float* out) {
  const PackedPool packed(*c.packed);
  const int dim = int(packed.pool.value_dim);
  for (int i = 0; i < n; i += RUN) {
    const char* values = packed.values(part.pages, at + i);
    const char* later = later_values(packed, part, at, n, i);
    weigh_run<bf16>(reinterpret_cast<const bf16*>(values), std::min(RUN, n - i), dim, weights + i, CHUNK, c.group, out, c.out_stride, later);
  }
}

}  // namespace

void attend_packed(const Call& c, int r, int split, const Slab& slab, const Scratch& scratch) {
  const int group = c.group;
  const Part part = c.packed_part(r);
  const int begin = (split - part.first_split) * SPLIT, end = std::min(begin + SPLIT, part.lens);
  float* top = slab.top + split * group;
  float* total = slab.total + split * group;
  float* out = slab.out + int64_t(split) * group * c.out_stride;
  for (int h = 0; h < group; ++h) top[h] = LOW, total[h] = 0.0f;
  std::memset(out, 0, size_t(group) * size_t(c.out_stride) * 4);
  load_packed_queries(c, r, int(round_up(c.packed_pool.key_dim, QUERY_PAD)), scratch.packed_query, scratch.rows);
  for (int at = begin; at < end; at += CHUNK) {
    const int n = std::min(CHUNK, end - at);
    float* weights = c.gathers ? slab.weights + chunk_of(part, at) * group * CHUNK : scratch.weights;
    if (c.packed->key.format == ROWS)
      row_logits(c, part, at, n, scratch, weights);
    else if (c.packed->rope.pairs != nullptr)
      turned_logits(c, r, part, at, n, scratch, weights);
    else
      with_format(c.packed->key.format, [&](auto f) { packed_logits<f>(c, r, part, at, n, scratch, weights); });
    soften_chunk(c, r, part, at, n, slab, scratch, weights, top, total, out);
    if (c.packed->value.format == ROWS)
      row_sums(c, part, at, n, weights, out);
    else
      with_format(c.packed->value.format, [&](auto f) { packed_sums<f>(c, part, at, n, scratch, weights, out); });
  }
}

}  // namespace mp
