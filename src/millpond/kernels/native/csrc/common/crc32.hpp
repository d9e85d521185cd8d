// CRC-32 as zlib computes it.
#pragma once

#include <cstdint>

namespace mp {

// Whether this CPU multiplies without carries, so that `crc32` is faster than zlib's, and may be called.
bool has_crc32();

// The checksum of n bytes that follow others whose checksum is `before`; 0: none do.
uint32_t crc32(const void* data, int64_t n, uint32_t before);

}  // namespace mp
