// Which kernels run on this machine: decided at run time from one build.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels.h"
#include "rows.h"

namespace pagedkv {

// What processor and operating system offer, by the name of the feature.
std::map<std::string, bool> cpu_features();

// Instruction sets that this build has and this machine runs, slowest first.
std::vector<std::string> available_isas();

// Throw std::invalid_argument for a name that is not among those.
const Kernels& kernels_for(const std::string& isa, DType dtype);
const LinearKernels& linear_kernels_for(const std::string& isa, DType dtype);
const RowKernels& row_kernels_for(const std::string& isa, DType dtype);

}  // namespace pagedkv
