// SPDX-License-Identifier: Apache-2.0
#include "expression.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sstream>
#include <stdexcept>

namespace rbln {
namespace {

const std::map<std::string, Step>& words() {
  static const std::map<std::string, Step> table = {
      {"add", Step::kAdd},         {"sub", Step::kSub},
      {"mul", Step::kMul},         {"div", Step::kDiv},
      {"maximum", Step::kMaximum}, {"minimum", Step::kMinimum},
      {"neg", Step::kNeg},         {"abs", Step::kAbs},
      {"exp", Step::kExp},         {"log", Step::kLog},
      {"sqrt", Step::kSqrt},       {"rsqrt", Step::kRsqrt},
      {"tanh", Step::kTanh},       {"sigmoid", Step::kSigmoid},
      {"sin", Step::kSin},         {"cos", Step::kCos},
      {"relu", Step::kRelu},       {"silu", Step::kSilu},
      {"gelu", Step::kGelu},       {"gelu_tanh", Step::kGeluTanh},
      {"square", Step::kSquare},   {"cube", Step::kCube},
  };
  return table;
}

ExpressionStep parse_word(const std::string& word) {
  const auto found = words().find(word);
  if (found != words().end()) return {found->second};
  char* end = nullptr;
  if (word.size() > 1 && word[0] == 'i') {
    const long input = std::strtol(word.c_str() + 1, &end, 10);
    if (*end == 0 && input >= 0 && input < kMaxOperands) {
      return {Step::kInput, static_cast<int>(input)};
    }
  }
  if (word.size() > 1 && word[0] == 'c') {
    const double constant = std::strtod(word.c_str() + 1, &end);
    if (*end == 0) return {Step::kConstant, 0, static_cast<float>(constant)};
  }
  throw std::invalid_argument("elementwise: unknown word '" + word + "'");
}

// How the stack grows by a step, and how many values the step needs on it.
std::pair<int, int> effect(Step step) {
  if (step <= Step::kConstant) return {1, 0};
  if (step <= Step::kMinimum) return {-1, 2};
  return {0, 1};
}

}  // namespace

std::optional<Activation> parse_activation(const std::string& name) {
  static const std::map<std::string, Activation> names = {
      {"none", Activation::kNone},          {"relu", Activation::kRelu},
      {"silu", Activation::kSilu},          {"gelu", Activation::kGelu},
      {"gelu_tanh", Activation::kGeluTanh}, {"quick_gelu", Activation::kQuickGelu},
      {"tanh", Activation::kTanh},          {"sigmoid", Activation::kSigmoid},
      {"relu2", Activation::kRelu2},
  };
  const auto found = names.find(name);
  if (found == names.end()) return std::nullopt;
  return found->second;
}

std::vector<ExpressionStep> parse_expression(const std::string& text) {
  std::vector<ExpressionStep> steps;
  std::istringstream stream(text);
  int depth = 0;
  for (std::string word; stream >> word;) {
    steps.push_back(parse_word(word));
    const auto [growth, needed] = effect(steps.back().step);
    if (depth < needed) throw std::invalid_argument("elementwise: '" + word + "' lacks a value");
    depth += growth;
    if (depth > kMaxStack) throw std::invalid_argument("elementwise: the stack is too deep");
  }
  if (depth != 1) throw std::invalid_argument("elementwise: the expression leaves no single value");
  return steps;
}

}  // namespace rbln
