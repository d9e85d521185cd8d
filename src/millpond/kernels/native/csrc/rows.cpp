// What else a decoder does to a few rows between its matrices: RMSNorm and the rotary embedding.
#include "convert.hpp"
#include "norm.hpp"
#include "workspace.hpp"

namespace mp {
namespace {

// One head of one row, in place; as torch does it, each product is rounded to `dtype` before the sum.
void rotate(char* x, const float* cos, const float* sin, float* wide, float* turned, int dim, int64_t dtype) {
  const int half = dim / 2;
  widen(wide, x, dtype, dim);
  for (int i = 0; i < half; ++i) turned[i] = -wide[half + i] * sin[i];
  for (int i = half; i < dim; ++i) turned[i] = wide[i - half] * sin[i];
  for (int i = 0; i < dim; ++i) wide[i] *= cos[i];
  round_to(turned, dtype, dim);
  round_to(wide, dtype, dim);
  for (int i = 0; i < dim; ++i) wide[i] += turned[i];
  narrow(x, dtype, wide, dim);
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_rotate(const mp::RotateArgs* args) {
  using namespace mp;
  static thread_local Workspace workspace;
  const RotateArgs& a = *args;
  const int dim = int(a.dim);
  const int64_t item = dtype_bytes(a.dtype), room = round_up(dim, 16);
  float* wide = reinterpret_cast<float*>(workspace.get(4 * room * 4));
  if (wide == nullptr) return 1;
  float *turned = wide + room, *cos = wide + 2 * room, *sin = wide + 3 * room;
  for (int64_t m = 0; m < a.m; ++m) {
    widen(cos, static_cast<const char*>(a.cos) + m * a.cos_row * item, a.dtype, dim);
    widen(sin, static_cast<const char*>(a.sin) + m * a.cos_row * item, a.dtype, dim);
    for (int64_t h = 0; h < a.q_heads; ++h)
      rotate(static_cast<char*>(a.q) + (m * a.q_heads + h) * dim * item, cos, sin, wide, turned, dim, a.dtype);
    for (int64_t h = 0; h < a.k_heads; ++h)
      rotate(static_cast<char*>(a.k) + (m * a.k_heads + h) * dim * item, cos, sin, wide, turned, dim, a.dtype);
  }
  return 0;
}

extern "C" __attribute__((visibility("default"))) int mp_rms_norm(const mp::NormArgs* args) {
  using namespace mp;
  static thread_local Workspace workspace;
  const NormArgs& a = *args;
  const int64_t item = dtype_bytes(a.dtype);
  float* wide = reinterpret_cast<float*>(workspace.get(a.n * 4));
  if (wide == nullptr) return 1;
  for (int64_t m = 0; m < a.m; ++m) {
    normalise(wide, static_cast<const char*>(a.x) + m * a.x_row * item, a.weight, a.dtype, int(a.n), float(a.eps));
    narrow(static_cast<char*>(a.out) + m * a.n * item, a.dtype, wide, int(a.n));
  }
  return 0;
}
