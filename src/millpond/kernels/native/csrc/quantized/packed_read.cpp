// Packed pages as rows of floats: codes are taken out of their tiles, and become the numbers that they stand for.
//
// The arithmetic is that of kernels/packed/codes.py, bit for bit. Compile without contraction of a * b + c.
#include "common/threads.hpp"
#include "common/workspace.hpp"
#include "quantized/bit_pack.hpp"

namespace mp {
namespace {

// The codes (n, dim) of a page whose lanes are slots.
template <int F>
void take_keys(const SideArgs& a, const Sheet& s, const char* page) {
  constexpr int BITS = low_bits(F);
  constexpr uint32_t mask = (1u << BITS) - 1;
  const int words = int(low_words(F, s.dim)), top = int(top_words(s.dim));
  for (int first = 0; first < s.n; first += LANES) {
    const int lanes = std::min(LANES, s.n - first);
    const uint32_t* low = reinterpret_cast<const uint32_t*>(page + a.codes) + first / LANES * words * LANES;
    const uint32_t* third = reinterpret_cast<const uint32_t*>(page + a.top) + first / LANES * top * LANES;
    for (int d = 0; d < s.dim; ++d) {
      const Place at = place<BITS>(d), last = place<1>(d);
      uint8_t* to = s.codes + int64_t(first) * s.dim + d;
      for (int i = 0; i < lanes; ++i) {
        uint32_t code = low[at.word * LANES + i] >> at.bit & mask;
        if (bits_of(F) == 3) code |= (third[last.word * LANES + i] >> last.bit & 1u) << 2;
        to[int64_t(i) * s.dim] = uint8_t(code);
      }
    }
  }
}

// The codes (n, dim) of a page whose lanes are channels.
template <int F>
void take_values(const SideArgs& a, const Sheet& s, int slots, const char* page) {
  constexpr int BITS = low_bits(F);
  constexpr uint32_t mask = (1u << BITS) - 1;
  for (int c = 0; c < s.dim / LANES; ++c) {
    const uint32_t* low = reinterpret_cast<const uint32_t*>(page + a.codes) + c * low_words(F, slots) * LANES;
    const uint32_t* third = reinterpret_cast<const uint32_t*>(page + a.top) + c * top_words(slots) * LANES;
    for (int t = 0; t < s.n; ++t) {
      const Place at = place<BITS>(t), last = place<1>(t);
      const uint32_t *row = low + at.word * LANES, *top = third + last.word * LANES;
      uint8_t* to = s.codes + int64_t(t) * s.dim + c * LANES;
      for (int i = 0; i < LANES; ++i) {
        uint32_t code = row[i] >> at.bit & mask;
        if (bits_of(F) == 3) code |= (top[i] >> last.bit & 1u) << 2;
        to[i] = uint8_t(code);
      }
    }
  }
}

// Scales or zeros of slot t as floats, one for each channel.
void factors_of(const SideArgs& a, const f16* from, int t, int slots, int dim, float* to) {
  if (a.by_channel) {
    widen(to, from + t / a.group * dim, F16, dim);
    return;
  }
  const int group = int(a.group);
  for (from += t; dim > 0; dim -= group, to += group, from += slots) std::fill(to, to + group, widened(*from));
}

// The numbers of one slot: `number` of each code, times a scale, plus a zero where there is one.
template <class Number>
MP_INLINE void numbers_of(const uint8_t* codes, const float* scales, const float* zeros, int dim, float* x, Number number) {
  for (int d = 0; d < dim; ++d) x[d] = number(codes[d]) * scales[d];
  for (int d = 0; zeros != nullptr && d < dim; ++d) x[d] += zeros[d];
}

template <int F>
void decode_as(const SideArgs& a, const Sheet& s, int slots, int head, const char* page, bool is_key, float* spare) {
  is_key ? take_keys<F>(a, s, page) : take_values<F>(a, s, slots, page);
  const bool fixed = a.fixed_scales != nullptr, has_zeros = fixed || a.zeros >= 0;
  float numbers[256];  // of codes that are no whole numbers
  for (int i = 0; F == FP8 && i < 256; ++i) numbers[i] = i < 128 ? e4m3_size(i) : -e4m3_size(i - 128);
  for (int i = 0; is_table(F) && i < 1 << bits_of(F); ++i) numbers[i] = a.table[i];
  const int shift = has_zeros ? 0 : 1 << (bits_of(F) - 1);
  float *scales = spare, *zeros = has_zeros ? spare + s.dim : nullptr;
  if (F == FP8) std::fill(scales, scales + s.dim, *reinterpret_cast<const float*>(page + a.scales));
  if (fixed) {
    std::memcpy(scales, a.fixed_scales + int64_t(head) * s.dim, size_t(s.dim) * 4);
    std::memcpy(zeros, a.fixed_zeros + int64_t(head) * s.dim, size_t(s.dim) * 4);
  }
  for (int t = 0; t < s.n; ++t) {
    if (F != FP8 && !fixed && (!a.by_channel || t % a.group == 0)) {
      factors_of(a, halves(page, a.scales), t, slots, s.dim, scales);
      if (has_zeros) factors_of(a, halves(page, a.zeros), t, slots, s.dim, zeros);
    }
    const uint8_t* codes = s.codes + int64_t(t) * s.dim;
    float* x = s.x + int64_t(t) * s.dim;
    if (F == FP8 || is_table(F))
      numbers_of(codes, scales, zeros, s.dim, x, [&](uint8_t code) { return numbers[code]; });
    else
      numbers_of(codes, scales, zeros, s.dim, x, [&](uint8_t code) { return float(int(code) - shift); });
  }
}

// The numbers (n, dim) of one side of a page, as they are stored. spare: two rows.
void decode(const SideArgs& a, const Sheet& s, int slots, int head, const char* page, bool is_key, float* spare) {
  if (a.format == ROWS) {
    widen(s.x, page + a.codes, BF16, s.n * s.dim);
    return;
  }
  with_format(a.format, [&](auto f) { decode_as<f>(a, s, slots, head, page, is_key, spare); });
  if (a.means >= 0) {
    widen(spare, halves(page, a.means), F16, s.dim);
    for (int t = 0; t < s.n; ++t)
      for (int d = 0; d < s.dim; ++d) s.x[int64_t(t) * s.dim + d] += spare[d];
  }
  const uint16_t* where = reinterpret_cast<const uint16_t*>(page + a.extra);
  const f16* what = halves(page, a.extra + 2 * a.n_extra);
  for (int64_t i = 0; i < a.n_extra; ++i)
    if (where[i] / 256 < s.n) s.x[int64_t(where[i] / 256) * s.dim + where[i] % 256] += widened(what[i]);
}

// Turns a key from position 0 to its own.
void turn_to(const RopeArgs& rope, float* x, int64_t position) {
  const int64_t n = rope.n_pairs;
  const float *cos = rope.cos + position * n, *sin = rope.sin + position * n;
  for (int64_t i = 0; i < n; ++i) {
    float &a = x[rope.pairs[2 * i]], &b = x[rope.pairs[2 * i + 1]];
    const float first = a;
    a = first * cos[i] - b * sin[i];
    b = b * cos[i] + first * sin[i];
  }
}

// A row of which some channels are stored; the others stay 0.
void spread(const float* x, const int32_t* channels, int dim, float* to) {
  if (channels == nullptr) std::memcpy(to, x, size_t(dim) * 4);
  for (int d = 0; channels != nullptr && d < dim; ++d) to[channels[d]] = x[d];
}

// Slots from `begin` to `end` of region r, all in one page.
void read_run(const PackedReadArgs& a, const PackedPool& pool, int64_t r, int64_t begin, int64_t end, char* memory) {
  const PackedArgs& packed = a.packed;
  const int32_t* pages = pool.pages(int(r));
  const int n = int(end - begin), slots = int(pool.pool.slots), head = int(r % a.n_kv_heads);
  const int key_dim = int(pool.pool.key_dim), value_dim = int(pool.pool.value_dim), dim = std::max(key_dim, value_dim);
  const char* page = pool.page(pages, begin);
  const int64_t first = r * a.width + begin;
  float *numbers = reinterpret_cast<float*>(memory), *spare = numbers + int64_t(slots) * dim;
  Sheet s{numbers, reinterpret_cast<uint8_t*>(spare + 2 * dim), nullptr, n, key_dim};
  for (int t = 0; t < n; ++t) {
    a.positions[first + t] = *pool.pool.position(pages, begin + t);
    a.scores[first + t] = *pool.pool.score(pages, begin + t);
    if (a.log_masses != nullptr) a.log_masses[first + t] = *pool.pool.log_mass(pages, begin + t);
  }
  decode(packed.key, s, slots, head, page, true, spare);
  const int32_t* channels = packed.channels != nullptr ? packed.channels + r * key_dim : nullptr;
  const float* balance = packed.balance != nullptr ? packed.balance + r * key_dim : nullptr;
  for (int t = 0; t < n; ++t) {
    float* x = s.x + int64_t(t) * key_dim;
    if (packed.rope.pairs != nullptr) turn_to(packed.rope, x, std::max(0, a.positions[first + t]));
    for (int d = 0; balance != nullptr && d < key_dim; ++d) x[d] *= balance[d];
    spread(x, channels, key_dim, a.keys + (first + t) * a.head_dim);
  }
  s.dim = value_dim;
  decode(packed.value, s, slots, head, page, false, spare);
  channels = packed.value_channels != nullptr ? packed.value_channels + r * value_dim : nullptr;
  for (int t = 0; t < n; ++t) spread(s.x + int64_t(t) * value_dim, channels, value_dim, a.values + (first + t) * a.value_dim);
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_read_packed(const mp::PackedReadArgs* args) {
  using namespace mp;
  const PackedReadArgs& a = *args;
  const PackedPool pool(a.packed);
  const int64_t slots = pool.pool.slots, pages = (a.width + slots - 1) / slots;
  const int64_t dim = std::max(pool.pool.key_dim, pool.pool.value_dim);
  std::atomic<int> trouble{FINE};
  auto body = [&](int64_t item) {
    static thread_local Workspace workspace;
    const int64_t r = item / pages, begin = item % pages * slots, end = std::min<int64_t>(a.packed.lens[r], begin + slots);
    if (begin >= end) return;
    char* memory = workspace.get((slots * 5 + 8) * dim);
    if (memory == nullptr)
      trouble.store(NO_MEMORY, std::memory_order_relaxed);
    else
      read_run(a, pool, r, begin, end, memory);
  };
  parallel_for(a.n_regions * pages, int(a.n_threads), body);
  return trouble.load();
}
