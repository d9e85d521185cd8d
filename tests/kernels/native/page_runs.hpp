// Rows from arenas to arenas, and runs of pages packed with a checksum, checked and unpacked.
#pragma once

#include "harness.hpp"

namespace check {

// CRC-32 bit by bit.
inline uint32_t slow_crc32(const uint8_t* data, int64_t n, uint32_t before) {
  uint32_t state = ~before;
  for (int64_t i = 0; i < n; ++i) {
    state ^= data[i];
    for (int bit = 0; bit < 8; ++bit) state = state & 1 ? state >> 1 ^ 0xEDB88320u : state >> 1;
  }
  return ~state;
}

inline void page_runs(const Kernels& kernels, Report& report) {
  report.begin("runs of pages", 0);
  Random random{11};
  Pages source(3, 160, 16, 20, 24, mp::F16, false, random), target(3, 160, 16, 20, 24, mp::F16, false, random);
  for (auto& arena : source.memory)
    for (char& byte : arena) byte = char(random.below(256));
  const int64_t which[2] = {0, 1}, row_bytes[2] = {16 * 20 * 2, 16 * 24 * 2}, page = row_bytes[0] + row_bytes[1];
  const auto rows = [&](const Pages& of) {
    return mp::RowArrays{of.bases.data(), which, row_bytes, 2, of.arenas(), Pages::PER_ARENA};
  };
  const auto byte = [&](const Pages& of, int64_t k, int64_t row, int64_t i) {
    const int64_t base = of.bases[size_t(k * of.arenas() + row / Pages::PER_ARENA)];
    return reinterpret_cast<const uint8_t*>(intptr_t(base))[row % Pages::PER_ARENA * row_bytes[k] + i];
  };
  const auto equal = [&](const char* what, int64_t row, int64_t other) {
    for (int64_t k = 0; k < 2; ++k)
      for (int64_t i = 0; i < row_bytes[k]; ++i) report.same(what, byte(target, k, row, i), byte(source, k, other, i));
  };
  const int64_t from[3] = {29, 0, 7}, to[3] = {5, 13, 28};
  report.same("the result of a move", kernels("mp_move_rows", mp::MoveRowsArgs{rows(source), rows(target), from, to, 3}), 0);
  for (int n = 0; n < 3; ++n) equal("a byte that was moved", to[n], from[n]);

  const int64_t ids[5] = {3, 17, 22, 1, 9}, n_pages[2] = {3, 2}, generations[2] = {7, 1 << 20};
  vector<uint8_t> data(size_t(5 * page + 100), 0xAA);
  const int64_t places[2] = {3, 3 + 3 * page + 40};
  int64_t checksums[2];
  for (int r = 0; r < 2; ++r) {
    uint8_t* room = data.data() + places[r];
    const int64_t needed = n_pages[r] * page, spare = r == 0 ? 33 : 0;
    const mp::PackRunArgs a{rows(source), ids + 3 * r, n_pages[r], room, needed + spare, generations[r]};
    const int64_t found = kernels.symbol<int64_t(const void*)>("mp_pack_run")(&a);
    if (found < 0) return report.end();  // this CPU has no fast checksum
    int64_t i = 0;
    for (int64_t k = 0; k < 2; ++k)
      for (int64_t n = 0; n < n_pages[r]; ++n)
        for (int64_t j = 0; j < row_bytes[k]; ++j)
          report.same("a byte of a run", room[i++], byte(source, k, ids[3 * r + n], j));
    for (; i < needed + spare; ++i) report.same("a byte behind a run", room[i], 0);
    report.same("what follows the room", room[i], 0xAA);
    report.same("a checksum", found, slow_crc32(room, needed, uint32_t(generations[r])));
    checksums[r] = found;
  }
  const int64_t first[3] = {0, 2, 3}, own[3] = {2, 0, 1}, into[3] = {11, 12, 2};
  const mp::UnpackRunsArgs b{rows(target), data.data(), places, n_pages, generations, checksums, first, own, into, 2};
  report.same("whole runs", kernels("mp_unpack_runs", b), 2);
  const int64_t expected[3] = {ids[2], ids[0], ids[4]};
  for (int n = 0; n < 3; ++n) equal("a byte that was unpacked", into[n], expected[n]);
  for (auto& arena : target.memory) std::fill(arena.begin(), arena.end(), char(0x55));
  data[size_t(places[1] + 5)] ^= 16;
  report.same("runs before a damaged one", kernels("mp_unpack_runs", b), 1);
  equal("a byte before a damaged run", into[0], expected[0]);
  report.same("a page of a damaged run", byte(target, 0, into[2], 0), 0x55);
  report.end();
}

}  // namespace check
