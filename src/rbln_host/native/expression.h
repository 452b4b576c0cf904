// SPDX-License-Identifier: Apache-2.0
// Names of activations, and elementwise programs: postfix words separated by one space.
#pragma once

#include <string>
#include <vector>

#include "types.h"

namespace rbln {

// Both throw std::invalid_argument with the word that was not understood.
Activation parse_activation(const std::string& name);
std::vector<ExpressionStep> parse_expression(const std::string& text);

}  // namespace rbln
