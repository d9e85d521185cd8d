// Logits of packed keys that are stored before RoPE, compiled on its own: it is many templates.
#pragma once

#include "decode/attend.hpp"

namespace mp {

// Logits of slots at .. at + n of a part, from the queries in `scratch.packed_query`.
void turned_logits(const Call& c, int r, const Part& part, int at, int n, const Scratch& scratch, float* weights);

}  // namespace mp
