// Rows into packed pages: chosen rows are gathered, encoded group by group, and their codes laid into tiles.
#include "common/threads.hpp"
#include "common/workspace.hpp"
#include "quantized/bit_pack.hpp"
#include "quantized/outliers.hpp"

namespace mp {
namespace {

// Turns a key of which rows (n_pairs,) cos and sin are those of its position back to position 0. spare: n_pairs * 2.
void turn_back(const RopeArgs& rope, float* x, int64_t position, float* __restrict spare) {
  const int64_t n = rope.n_pairs;
  const float *cos = rope.cos + position * n, *sin = rope.sin + position * n;
  float *__restrict a = spare, *__restrict b = spare + n;
  for (int64_t i = 0; i < n; ++i) a[i] = x[rope.pairs[2 * i]], b[i] = x[rope.pairs[2 * i + 1]];
  for (int64_t i = 0; i < n; ++i) {
    const float norm = cos[i] * cos[i] + sin[i] * sin[i], c = cos[i] / norm, s = -sin[i] / norm, first = a[i];
    a[i] = first * c - b[i] * s;
    b[i] = b[i] * c + first * s;
  }
  for (int64_t i = 0; i < n; ++i) x[rope.pairs[2 * i]] = a[i], x[rope.pairs[2 * i + 1]] = b[i];
}

template <int F>
int encode_as(const SideArgs& a, const Sheet& s, int first, int slots, int head, char* page, bool is_key) {
  const float* scales = a.fixed_scales != nullptr ? a.fixed_scales + int64_t(head) * s.dim : nullptr;
  const float* zeros = a.fixed_zeros != nullptr ? a.fixed_zeros + int64_t(head) * s.dim : nullptr;
  bool large = false;
  if (s.far != nullptr) {
    scales != nullptr ? far_of_fixed<F>(s, scales, zeros) : a.by_channel ? far_by_channel(s, int(a.group)) : far_by_slot(s, int(a.group));
    if (const int trouble = mark_outliers(a, s, page); trouble != FINE) return trouble;
  }
  if (F == FP8)
    encode_e4m3(a, s, page);
  else if (scales != nullptr)
    encode_fixed<F>(a, s, scales, zeros);
  else if (a.by_channel)
    encode_by_channel<F>(a, s, first, page, large);
  else
    encode_by_slot<F>(a, s, first, slots, page, large);
  if (s.far != nullptr) write_remainders(a, s, slots, scales, zeros, page, large);
  is_key ? lay_keys<F>(a, s, first, page) : lay_values<F>(a, s, first, slots, page);
  return large ? TOO_LARGE : FINE;
}

int encode(const SideArgs& a, Sheet s, int first, int slots, int head, char* page, bool is_key) {
  if (a.format == ROWS) {
    narrow(page + a.codes + int64_t(first) * s.dim * 2, BF16, s.x, s.n * s.dim);
    return FINE;
  }
  if (!settle(s)) return NOT_FINITE;
  if (a.means >= 0 && subtract_means(s, page + a.means)) return TOO_LARGE;
  if (a.n_extra == 0) s.far = nullptr;
  int trouble = FINE;
  with_format(a.format, [&](auto f) { trouble = encode_as<f>(a, s, first, slots, head, page, is_key); });
  return trouble;
}

// A row as floats: all of its numbers, or those of some channels.
void widen_some(float* to, const void* from, int64_t dtype, const int32_t* channels, int dim) {
  if (channels == nullptr) return widen(to, from, dtype, dim);
  for (int d = 0; d < dim; ++d) widen(to + d, offset(from, dtype, channels[d]), dtype, 1);
}

// Slots [begin, end) of region r, all in one page.
int write_run(const PackedWriteArgs& a, const PackedPool& pool, int64_t r, int64_t begin, int64_t end, char* memory) {
  const int32_t* pages = pool.pages(int(r));
  const int n = int(end - begin), slots = int(pool.pool.slots), first = int(begin & (slots - 1));
  const int key_dim = int(pool.pool.key_dim), value_dim = int(pool.pool.value_dim), dim = std::max(key_dim, value_dim);
  char* page = pool.page(pages, begin);
  const int32_t* rows = a.index + r * a.index_row + (begin - a.start[r]);
  const int32_t* channels = a.packed.channels != nullptr ? a.packed.channels + r * key_dim : nullptr;
  const int32_t* value_channels = a.packed.value_channels != nullptr ? a.packed.value_channels + r * value_dim : nullptr;
  const float* balance = a.packed.balance != nullptr ? a.packed.balance + r * key_dim : nullptr;
  const int head = int(r % a.n_kv_heads);
  float *numbers = reinterpret_cast<float*>(memory), *far = numbers + int64_t(slots) * dim, *spare = far + int64_t(slots) * dim;
  Sheet s{numbers, reinterpret_cast<uint8_t*>(spare + dim), far, n, key_dim};
  for (int t = 0; t < n; ++t) {
    const void* from = offset(a.keys, a.k_dtype, r * a.k_region + rows[t] * a.k_row);
    float* to = s.x + int64_t(t) * key_dim;
    widen_some(to, from, a.k_dtype, channels, key_dim);
    for (int d = 0; balance != nullptr && d < key_dim; ++d) to[d] /= balance[d];
    if (a.packed.rope.pairs != nullptr) turn_back(a.packed.rope, to, std::max(0, a.positions[r * a.p_region + rows[t] * a.p_row]), spare);
  }
  if (const int trouble = encode(a.packed.key, s, first, slots, head, page, true); trouble != FINE) return trouble;
  s.dim = value_dim;
  for (int t = 0; t < n; ++t)
    widen_some(s.x + int64_t(t) * value_dim, offset(a.values, a.v_dtype, r * a.v_region + rows[t] * a.v_row), a.v_dtype,
               value_channels, value_dim);
  if (const int trouble = encode(a.packed.value, s, first, slots, head, page, false); trouble != FINE) return trouble;
  for (int t = 0; t < n; ++t) {
    const int64_t row = rows[t], slot = begin + t;
    *pool.pool.position(pages, slot) = a.positions[r * a.p_region + row * a.p_row];
    *pool.pool.score(pages, slot) = a.scores != nullptr ? a.scores[r * a.s_region + row * a.s_row] : 0.0f;
    if (pool.pool.masses)
      *pool.pool.log_mass(pages, slot) = a.log_masses != nullptr ? a.log_masses[r * a.m_region + row * a.m_row] : 0.0f;
  }
  return FINE;
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_write_packed(const mp::PackedWriteArgs* args) {
  using namespace mp;
  const PackedWriteArgs& a = *args;
  const PackedPool pool(a.packed);
  const int64_t slots = pool.pool.slots, pages = (a.width + slots - 1) / slots + 1;  // a run may begin inside a page
  const int64_t dim = std::max(pool.pool.key_dim, pool.pool.value_dim);
  std::atomic<int> trouble{FINE};
  auto body = [&](int64_t item) {
    static thread_local Workspace workspace;
    const int64_t r = item / pages, first_page = a.start[r] / slots + item % pages, end = a.start[r] + a.count[r];
    const int64_t begin = std::max<int64_t>(a.start[r], first_page * slots), stop = std::min(end, (first_page + 1) * slots);
    if (begin >= stop) return;
    char* memory = workspace.get((slots * 9 + 4) * dim);
    const int found = memory == nullptr ? NO_MEMORY : write_run(a, pool, r, begin, stop, memory);
    if (found != FINE) trouble.store(found, std::memory_order_relaxed);
  };
  parallel_for(a.n_regions * pages, int(a.n_threads), body);
  return trouble.load();
}
