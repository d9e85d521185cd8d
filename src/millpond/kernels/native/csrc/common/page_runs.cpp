// Rows from arenas to arenas, and runs of pages in the buffers that a disk is read and written through.
#include <cstring>

#include "common/args.hpp"
#include "common/crc32.hpp"

namespace mp {
namespace {

// One array of rows, with its divisions turned into shifts.
struct Rows {
  const int64_t* addresses;
  int64_t row_bytes, mask;
  int shift;

  Rows(const RowArrays& a, int64_t k)
      : addresses(a.bases + a.which[k] * a.n_arenas), row_bytes(a.row_bytes[k]), mask(a.per_arena - 1),
        shift(__builtin_ctzll(uint64_t(a.per_arena))) {}

  char* at(int64_t row) const {
    return reinterpret_cast<char*>(addresses[row >> shift]) + (row & mask) * row_bytes;
  }
};

int64_t page_bytes(const RowArrays& a) {
  int64_t sum = 0;
  for (int64_t k = 0; k < a.n_arrays; ++k) sum += a.row_bytes[k];
  return sum;
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int64_t mp_move_rows(const mp::MoveRowsArgs* args) {
  using namespace mp;
  for (int64_t k = 0; k < args->from.n_arrays; ++k) {
    const Rows from(args->from, k), to(args->to, k);
    for (int64_t i = 0; i < args->n_rows; ++i) {
      const char* source = from.at(args->from_rows != nullptr ? args->from_rows[i] : i);
      std::memcpy(to.at(args->to_rows != nullptr ? args->to_rows[i] : i), source, size_t(from.row_bytes));
    }
  }
  return 0;
}

// The checksum of the run; -1 where this CPU has none, and nothing was done.
extern "C" __attribute__((visibility("default"))) int64_t mp_pack_run(const mp::PackRunArgs* args) {
  using namespace mp;
  if (!has_crc32()) return -1;
  uint8_t* end = args->room;
  for (int64_t k = 0; k < args->pages.n_arrays; ++k) {
    const Rows rows(args->pages, k);
    for (int64_t i = 0; i < args->n_pages; ++i, end += rows.row_bytes)
      std::memcpy(end, rows.at(args->ids[i]), size_t(rows.row_bytes));
  }
  const int64_t needed = end - args->room;
  std::memset(end, 0, size_t(args->room_bytes - needed));
  return int64_t(crc32(args->room, needed, uint32_t(args->generation)));
}

// How many runs came before the first that has another checksum, which are in their pages then; -1 where this CPU has
// no checksums, and nothing was done.
extern "C" __attribute__((visibility("default"))) int64_t mp_unpack_runs(const mp::UnpackRunsArgs* args) {
  using namespace mp;
  if (!has_crc32()) return -1;
  const int64_t bytes = page_bytes(args->pages);
  for (int64_t r = 0; r < args->n_runs; ++r) {
    const uint8_t* begin = args->data + args->places[r];
    if (int64_t(crc32(begin, args->n_pages[r] * bytes, uint32_t(args->generations[r]))) != args->checksums[r]) return r;
    for (int64_t k = 0; k < args->pages.n_arrays; ++k) {
      const Rows rows(args->pages, k);
      for (int64_t i = args->first[r]; i < args->first[r + 1]; ++i)
        std::memcpy(rows.at(args->ids[i]), begin + args->rows[i] * rows.row_bytes, size_t(rows.row_bytes));
      begin += args->n_pages[r] * rows.row_bytes;
    }
  }
  return args->n_runs;
}
