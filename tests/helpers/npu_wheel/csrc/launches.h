// The bridge's operators as launches: what a capture records, and what the ledger of unfinished launches counts.
#pragma once
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace npusim {
void launch(const c10::OperatorHandle& op, c10::Stack* stack);     // the fallback as a launch
void add_recorded(torch::Library& library);                       // in place of those of add_compute
void add_launches(pybind11::module_& module);                     // kernels in Python
}
