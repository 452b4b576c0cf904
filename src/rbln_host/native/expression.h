// SPDX-License-Identifier: Apache-2.0
// Names of activations, and elementwise programs: postfix words separated by one space.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "types.h"

namespace rbln {

// Nothing when there is no activation of that name.
std::optional<Activation> parse_activation(const std::string& name);

// Throws std::invalid_argument with the word that was not understood.
std::vector<ExpressionStep> parse_expression(const std::string& text);

}  // namespace rbln
