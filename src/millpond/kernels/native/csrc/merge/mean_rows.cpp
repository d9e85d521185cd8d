// Means of rows and those that go into them.
#include "common/pages.hpp"
#include "common/threads.hpp"
#include "common/workspace.hpp"

namespace mp {
namespace {

const void* row_of(const MeanArgs& a, int64_t head, int64_t i) {
  return offset(a.x, a.dtype, head * a.x_head + i * a.x_row);
}

// Where rows take others in their mean, else the row as it is. `total`: (N,). `row`: (dim,).
void mean_rows(const MeanArgs& a, int64_t head, float* total, float* row) {
  const int dim = int(a.dim);
  const int64_t first = head * a.n;
  float* out = a.out + first * dim;
  for (int64_t i = 0; i < a.n; ++i) {
    widen(out + i * dim, row_of(a, head, i), a.dtype, dim);
    total[i] = -1.0f;  // nothing yet
  }
  for (int64_t i = 0; i < a.n; ++i) {
    if (!a.leaves[first + i]) continue;
    const int64_t to = a.into[first + i];
    if (total[to] < 0.0f) {
      total[to] = float(a.own[first + to]);
      for (int d = 0; d < dim; ++d) out[to * dim + d] *= total[to];
    }
    const float weight = float(a.weight[first + i]);
    widen(row, row_of(a, head, i), a.dtype, dim);
    for (int d = 0; d < dim; ++d) out[to * dim + d] += weight * row[d];
    total[to] += weight;
  }
  for (int64_t i = 0; i < a.n; ++i)
    for (int d = 0; total[i] >= 0.0f && d < dim; ++d) out[i * dim + d] /= total[i];
}

}  // namespace
}  // namespace mp

extern "C" __attribute__((visibility("default"))) int mp_mean_rows(const mp::MeanArgs* args) {
  using namespace mp;
  const int threads = int(std::max<int64_t>(1, std::min(args->n_threads, args->n_heads)));
  const int64_t floats = round_up(args->n + args->dim, 16);
  static thread_local Workspace workspace;
  char* memory = workspace.get(threads * floats * 4);
  if (memory == nullptr) return 1;
  std::atomic<int64_t> next{0};
  auto body = [&](int thread) {
    float* row = reinterpret_cast<float*>(memory) + thread * floats;
    for (int64_t h; (h = next.fetch_add(1, std::memory_order_relaxed)) < args->n_heads;)
      mean_rows(*args, h, row + args->dim, row);
  };
  parallel(threads, body);
  return 0;
}
