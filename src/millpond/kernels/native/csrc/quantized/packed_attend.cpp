// Attention of one region's queries over a range of its packed slots: as `attend`, with codes in place of numbers.
#include "quantized/packed_attend.hpp"

#include "quantized/packed_values.hpp"
#include "quantized/pre_rope_keys.hpp"

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

// Logits of slots at .. at + n of a part, 32 at a time.
template <int F>
void packed_logits(const Call& c, int r, const Part& part, int at, int n, const Scratch& scratch, float* weights) {
  const PackedPool packed(*c.packed);
  const SideArgs& a = c.packed->key;
  const int group = c.group, dim = int(packed.pool.key_dim), slots = int(packed.pool.slots);
  const bool fixed = a.fixed_scales != nullptr;
  const int groups = a.by_channel ? 1 : int(dim / a.group);
  const Folded q{scratch.packed_query, reinterpret_cast<Weight*>(scratch.folded), scratch.packed_bias,
                 scratch.packed_bias + 2 * group * groups, int(round_up(dim, QUERY_PAD)), largest_weight(dim)};
  float* by_mean = q.units + group * groups;  // (group,) of the page at hand
  const Table table = Table::of<F>(a.table);
  const float offset = offset_of(F);
  if (!a.by_channel) fold_slotwise<F>(offset + half_of(a), dim, int(a.group), groups, group, q);
  const auto fold = [&](const Factors& f) {
    for_heads(group, [&](auto heads, int h) { fold_channels<F, heads>(f, offset, dim, q, h); });
  };
  if (fixed) {
    const int64_t row = int64_t(c.head(r)) * dim;
    fold({a.fixed_scales + row, a.fixed_zeros + row, true, false, 0.0f});
  }
  for (int i = 0; i < n; i += RUN) {
    const int slot = (at + i) & (slots - 1);
    const char* page = packed.page(part.pages, at + i);
    const Later later(packed, part.pages, at + i, false, int(low_words(F, dim)));
    const KeyRun run = key_run<F>(packed, page, slot);
    float* s = weights + i;
    if (!a.by_channel) {
      const f16* scales = halves(page, a.scales) + slot;
      const f16* zeros = a.zeros >= 0 ? halves(page, a.zeros) + slot : nullptr;
      const auto go = [&](auto heads, int h) {
        slotwise_logits<F, heads>(run, q, h, h == 0 ? later : Later{}, scales, zeros, slots, int(a.group), groups, table, s, CHUNK);
      };
      for_heads(group, go);
      if (a.means >= 0) {
        if (i == 0 || slot == 0) mean_logits(a, page, dim, q, group, by_mean);
        for (int h = 0; h < group; ++h)
          for (int k = 0; k < RUN; k += W) store(s + h * CHUNK + k, load(s + h * CHUNK + k) + by_mean[h]);
      }
    } else {
      if (!fixed && (i == 0 || (at + i) % a.group == 0)) {
        const char* scales = page + a.scales + (F == FP8 ? 0 : slot / a.group * dim * 2);
        const char* zeros = a.zeros >= 0 ? page + a.zeros + slot / a.group * dim * 2 : nullptr;
        fold({scales, zeros, F == FP8, F == FP8, half_of(a)});
      }
      const auto go = [&](auto heads, int h) { folded_logits<F, heads>(run, q, h, h == 0 ? later : Later{}, table, s, CHUNK); };
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
    const char* later = packed.values(part.pages, at + i);
    dot_run<bf16>(keys, RUN, dim, query, stride, c.group, weights + i, CHUNK, later);
  }
}

// Add the values of slots at .. at + n of a part, weighted, to the output.
template <int F>
void packed_sums(const Call& c, const ValueChunk& chunk, const NextKeys& next, const Scratch& scratch, float* out) {
  const SideArgs& a = chunk.side();
  const int dim = int(chunk.packed.pool.value_dim), per_group = F == FP8 ? dim : int(a.group), tiles = per_group / LANES;
  const Table table = Table::of<F>(a.table);
  for (int g = 0; g < dim / per_group; ++g)
    for_heads(c.group, [&](auto heads, int h) {
      const auto folded = fold_slots<F, heads>(chunk, h, g, reinterpret_cast<Weight*>(scratch.folded));
      value_heads<F, heads>(chunk, g * tiles, (g + 1) * tiles, folded, table, out + h * c.out_stride, c.out_stride,
                            g == 0 && h == 0 ? next : NextKeys{});
    });
  for (int i = 0; a.n_extra > 0 && i < chunk.n; i += RUN)
    extra_values(a, chunk.page(i), chunk.slot(i), std::min(RUN, chunk.n - i), chunk.weights + i, CHUNK, c.group, out, c.out_stride);
}

// The same of values that are stored as rows of bf16.
void row_sums(const Call& c, const ValueChunk& chunk, const NextKeys& next, float* out) {
  const int dim = int(chunk.packed.pool.value_dim);
  for (int i = 0; i < chunk.n; i += RUN) {
    const char* values = chunk.packed.values(chunk.pages, chunk.at + i);
    const char* later = i < next.n ? chunk.packed.keys(next.pages, next.at + i) : values;
    weigh_run<bf16>(reinterpret_cast<const bf16*>(values), std::min(RUN, chunk.n - i), dim, chunk.weights + i, CHUNK,
                    c.group, out, c.out_stride, later);
  }
}

// Brings sums of the value channels that are kept to their places in the output; the others get nothing.
void spread_channels(const Call& c, int r, float* out) {
  if (c.packed->value_channels == nullptr) return;
  const int kept = int(c.packed_pool.value_dim);
  const int32_t* channels = c.packed->value_channels + int64_t(r) * kept;
  for (int h = 0; h < c.group; ++h, out += c.out_stride) {
    int end = c.out_stride;
    for (int d = kept; d-- > 0; end = channels[d]) {  // the last first: none moves to the left
      const float sum = out[d];
      std::fill(out + channels[d], out + end, 0.0f);
      out[channels[d]] = sum;
    }
    std::fill(out, out + end, 0.0f);
  }
}

}  // namespace

void attend_packed(const Call& c, int r, int split, const Slab& slab, const Scratch& scratch) {
  const int group = c.group;
  const Part part = c.packed_part(r);
  const PackedPool packed(*c.packed);
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
    const ValueChunk chunk{packed, part.pages, at, n, weights};
    const NextKeys next(c, r, part, at + n);
    if (c.packed->value.format == ROWS)
      row_sums(c, chunk, next, out);
    else
      with_format(c.packed->value.format, [&](auto f) { packed_sums<f>(c, chunk, next, scratch, out); });
  }
  spread_channels(c, r, out);
}

}  // namespace mp
