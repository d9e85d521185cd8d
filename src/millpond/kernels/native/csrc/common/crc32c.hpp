// CRC-32C (Castagnoli) as iSCSI has it.
#pragma once

#include <cstdint>

namespace mp {

// The checksum of n bytes that follow others whose checksum is `before`; 0: none do.
uint32_t crc32c(const void* data, int64_t n, uint32_t before);

}  // namespace mp
