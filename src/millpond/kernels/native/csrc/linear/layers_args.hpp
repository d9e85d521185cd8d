// The C ABI of all layers of a decoder in one call: see common/args.hpp.
#pragma once

#include "quantized/packed_args.hpp"

namespace mp {

// A layer for rows that decode, one of each sequence.
struct LayerArgs {
  HeadsArgs heads;
  PackedDecodeArgs decode;  // `packed` is all zeros where nothing lies in packed pages
  BehindArgs behind;
};

// Layers, each behind the one before it.
struct LayersArgs {
  int64_t n;
  LayerArgs layers[1];  // n of them
};

}  // namespace mp
