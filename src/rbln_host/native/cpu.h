// SPDX-License-Identifier: Apache-2.0
// Which instruction sets this CPU has, of those that were compiled in.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace rbln {

// Names from worst to best; "portable" is always there.
std::vector<std::string> isa_levels();

// Throws std::invalid_argument for a level this CPU or this build lacks.
KernelTable kernels_for(const std::string& level);

}  // namespace rbln
