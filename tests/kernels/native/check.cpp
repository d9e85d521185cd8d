// Runs every kernel of the library that is named, and compares it with loops in double. See test_native_program.py.
#include "copies.hpp"
#include "decode.hpp"
#include "head_rules.hpp"
#include "linear.hpp"
#include "merging.hpp"
#include "packed.hpp"
#include "page_runs.hpp"
#include "prefill.hpp"
#include "sampling.hpp"
#include "shared_prefix.hpp"
#include "transform.hpp"
#include "unit_sums.hpp"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::printf("usage: check LIBRARY\n");
    return 2;
  }
  const check::Kernels kernels(argv[1]);
  check::Report report;
  check::copies(kernels, report);
  check::page_runs(kernels, report);
  check::decode(kernels, report);
  check::prefill(kernels, report);
  check::shared_prefix(kernels, report);
  check::packed(kernels, report);
  check::linear(kernels, report);
  check::merging(kernels, report);
  check::sampling(kernels, report);
  check::transform(kernels, report);
  check::unit_sums(kernels, report);
  check::head_rules(kernels, report);
  return report.wrong() > 0;
}
