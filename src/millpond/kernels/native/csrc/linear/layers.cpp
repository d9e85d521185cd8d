// All layers of a decoder for rows that decode, in one call: nothing but the CPU's memory is waited for in between.
#include "common/args.hpp"

extern "C" int mp_heads(const mp::HeadsArgs* args);
extern "C" int mp_decode(const mp::DecodeArgs* args);
extern "C" int mp_behind(const mp::BehindArgs* args);

// Stops at the first that fails, and returns what it did.
extern "C" __attribute__((visibility("default"))) int mp_layers(const mp::LayersArgs* args) {
  for (int64_t i = 0; i < args->n; ++i) {
    const mp::LayerArgs& layer = args->layers[i];
    if (const int failed = mp_heads(&layer.heads)) return failed;
    if (const int failed = mp_decode(&layer.decode)) return failed;
    if (const int failed = mp_behind(&layer.behind)) return failed;
  }
  return 0;
}
