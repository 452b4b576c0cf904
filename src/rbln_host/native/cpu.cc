// SPDX-License-Identifier: Apache-2.0
#include "cpu.h"

#include <stdexcept>

namespace rbln {
namespace {

struct Level {
  const char* name;
  KernelTable (*kernels)();
};

std::vector<Level> levels() {
  std::vector<Level> found = {{"portable", kernels_portable}};
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(RBLN_HAS_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    found.push_back({"avx2", kernels_avx2});
  }
#endif
#if defined(RBLN_HAS_AVX512)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) found.push_back({"avx512", kernels_avx512});
#if defined(RBLN_HAS_AVX512_BF16)
  if (avx512 && __builtin_cpu_supports("avx512bf16")) {
    found.push_back({"avx512_bf16", kernels_avx512_bf16});
  }
#endif
#endif
#endif
  return found;
}

}  // namespace

std::vector<std::string> isa_levels() {
  std::vector<std::string> names;
  for (const Level& level : levels()) names.emplace_back(level.name);
  return names;
}

KernelTable kernels_for(const std::string& name) {
  for (const Level& level : levels()) {
    if (name == level.name) return level.kernels();
  }
  throw std::invalid_argument("instruction set '" + name + "' is not one this CPU and build have");
}

}  // namespace rbln
