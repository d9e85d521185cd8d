// Attention over packed slots, compiled on its own: it is many templates.
#pragma once

#include "decode/attend.hpp"

namespace mp {

// Split number `split` of region r, one of its packed part.
void attend_packed(const Call& c, int r, int split, const Slab& slab, const Scratch& scratch);

}  // namespace mp
