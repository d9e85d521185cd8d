// All layers of a decoder for rows that decode, in one call: nothing but the CPU's memory is waited for in between.
#include "linear/layers_args.hpp"

extern "C" int mp_heads(const mp::HeadsArgs* args);
extern "C" int mp_decode(const mp::DecodeArgs* args);
extern "C" int mp_decode_packed(const mp::PackedDecodeArgs* args);
extern "C" int mp_behind(const mp::BehindArgs* args);

// Stops at the first that fails, and returns what it did.
extern "C" __attribute__((visibility("default"))) int mp_layers(const mp::LayersArgs* args) {
  for (int64_t i = 0; i < args->n; ++i) {
    const mp::LayerArgs& layer = args->layers[i];
    if (const int failed = mp_heads(&layer.heads)) return failed;
    const bool packed = layer.decode.packed.table != nullptr;
    if (const int failed = packed ? mp_decode_packed(&layer.decode) : mp_decode(&layer.decode.plain)) return failed;
    if (const int failed = mp_behind(&layer.behind)) return failed;
  }
  return 0;
}
