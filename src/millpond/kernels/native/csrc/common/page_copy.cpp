// Rows into pages and out of them.
#include "common/pages.hpp"
#include "common/threads.hpp"

namespace mp {
namespace {

constexpr int64_t ROWS = 256;                  // rows per work item
constexpr int64_t ROWS_PER_THREAD = 4 * ROWS;  // a thread is worth waking for this many

int useful_threads(int64_t rows, int64_t wanted) {
  return int(std::max<int64_t>(1, std::min(wanted, rows / ROWS_PER_THREAD)));
}

void write_rows(const WriteArgs& a, const Pool& pool, int64_t r, int64_t begin, int64_t end) {
  const int32_t* pages = a.table + r * a.table_row;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = a.index[r * a.index_row + i], slot = a.start[r] + i;
    const void* key = offset(a.keys, a.k_dtype, r * a.k_region + row * a.k_row);
    const void* value = offset(a.values, a.v_dtype, r * a.v_region + row * a.v_row);
    copy_row(pool.key(pages, slot), pool.dtype, key, a.k_dtype, pool.key_dim);
    copy_row(pool.value(pages, slot), pool.dtype, value, a.v_dtype, pool.value_dim);
    *pool.position(pages, slot) = a.positions[r * a.p_region + row * a.p_row];
    *pool.score(pages, slot) = a.scores != nullptr ? a.scores[r * a.s_region + row * a.s_row] : 0.0f;
    if (pool.masses)
      *pool.log_mass(pages, slot) = a.log_masses != nullptr ? a.log_masses[r * a.m_region + row * a.m_row] : 0.0f;
  }
}

void read_rows(const ReadArgs& a, const Pool& pool, int64_t r, int64_t begin, int64_t end) {
  const int32_t* pages = a.table + r * a.table_row;
  const int64_t key_bytes = pool.key_dim * pool.item, value_bytes = pool.value_dim * pool.item;
  const int64_t stored = std::max(begin, std::min<int64_t>(a.lens[r], end)), first = r * a.width;
  char* keys = static_cast<char*>(a.keys) + first * key_bytes;
  char* values = static_cast<char*>(a.values) + first * value_bytes;
  for (int64_t i = begin; i < stored;) {
    const int64_t run = pool.run(i, stored, ROWS);
    std::memcpy(keys + i * key_bytes, pool.key(pages, i), size_t(run * key_bytes));
    std::memcpy(values + i * value_bytes, pool.value(pages, i), size_t(run * value_bytes));
    std::memcpy(a.positions + first + i, pool.position(pages, i), size_t(run) * 4);
    std::memcpy(a.scores + first + i, pool.score(pages, i), size_t(run) * 4);
    if (pool.masses) std::memcpy(a.log_masses + first + i, pool.log_mass(pages, i), size_t(run) * 4);
    i += run;
  }
  std::memset(keys + stored * key_bytes, 0, size_t((end - stored) * key_bytes));
  std::memset(values + stored * value_bytes, 0, size_t((end - stored) * value_bytes));
  std::fill(a.positions + first + stored, a.positions + first + end, -1);
  std::fill(a.scores + first + stored, a.scores + first + end, 0.0f);
  if (pool.masses) std::fill(a.log_masses + first + stored, a.log_masses + first + end, 0.0f);
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_write(const mp::WriteArgs* args) {
  using namespace mp;
  const Pool pool(args->pool);
  int64_t rows = 0;
  for (int64_t r = 0; r < args->n_regions; ++r) rows += std::max<int64_t>(0, args->count[r]);
  const int64_t blocks = (args->width + ROWS - 1) / ROWS;
  auto body = [&](int64_t item) {
    const int64_t r = item / blocks, begin = item % blocks * ROWS;
    write_rows(*args, pool, r, begin, std::min<int64_t>(begin + ROWS, std::min<int64_t>(args->count[r], args->width)));
  };
  parallel_for(args->n_regions * blocks, useful_threads(rows, args->n_threads), body);
  return 0;
}

extern "C" __attribute__((visibility("default"))) int mp_read(const mp::ReadArgs* args) {
  using namespace mp;
  const Pool pool(args->pool);
  const int64_t blocks = (args->width + ROWS - 1) / ROWS;
  auto body = [&](int64_t item) {
    const int64_t r = item / blocks, begin = item % blocks * ROWS;
    read_rows(*args, pool, r, begin, std::min(begin + ROWS, args->width));
  };
  parallel_for(args->n_regions * blocks, useful_threads(args->n_regions * args->width, args->n_threads), body);
  return 0;
}
