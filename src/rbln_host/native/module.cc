// SPDX-License-Identifier: Apache-2.0
// The Python module rbln_host._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "cpu.h"
#include "kv_copy.h"
#include "program.h"

namespace nb = nanobind;

namespace {

rbln::DType dtype_of(const std::string& name) {
  static const std::map<std::string, rbln::DType> names = {
      {"bfloat16", rbln::DType::kBFloat16}, {"float16", rbln::DType::kFloat16},
      {"float32", rbln::DType::kFloat32},   {"int32", rbln::DType::kInt32},
      {"int64", rbln::DType::kInt64},
  };
  const auto found = names.find(name);
  if (found == names.end()) throw std::invalid_argument("unknown dtype '" + name + "'");
  return found->second;
}

using Three = std::tuple<int64_t, int64_t, int64_t>;

rbln::KvLayer kv_layer_of(const Three& layer) {
  const auto [pointer, heads, token_bytes] = layer;
  return {reinterpret_cast<std::byte*>(pointer), heads, token_bytes};
}

rbln::KvBlockCopy kv_copy_of(const Three& copy) {
  const auto [source, target, tokens] = copy;
  return {source, target, tokens};
}

template <class To>
std::vector<To> each(const std::vector<Three>& items, To (*convert)(const Three&)) {
  std::vector<To> converted;
  converted.reserve(items.size());
  for (const Three& item : items) converted.push_back(convert(item));
  return converted;
}

}  // namespace

NB_MODULE(_native, m) {
  // Programs live until the process ends; that is no leak.
  nb::set_leak_warnings(false);
  m.doc() = "The native executor: programs of prepared kernels on a pool of pinned threads.";
  m.def("isa_levels", &rbln::isa_levels, "Instruction sets of this CPU, worst to best.");

  nb::class_<rbln::Pool>(m, "Pool", "Threads, one per CPU; the caller of a run is the first.")
      .def(
          "__init__",
          [](rbln::Pool* self, std::vector<int> cpus, int spin_us) {
            if (cpus.empty()) throw std::invalid_argument("a pool needs at least one CPU");
            new (self) rbln::Pool(std::move(cpus), spin_us);
          },
          nb::arg("cpus"), nb::arg("spin_us") = 20)
      .def_prop_ro("threads", &rbln::Pool::threads);

  nb::class_<rbln::TensorSpec>(m, "Tensor", "A tensor in a base region.")
      .def(
          "__init__",
          [](rbln::TensorSpec* self, int base, int64_t offset, const std::string& dtype,
             std::vector<int64_t> shape, std::vector<int64_t> strides) {
            new (self) rbln::TensorSpec{base, offset, dtype_of(dtype), std::move(shape),
                                        std::move(strides)};
          },
          nb::arg("base"), nb::arg("offset"), nb::arg("dtype"), nb::arg("shape"),
          nb::arg("strides"));

  nb::class_<rbln::CommandSpec>(m, "Command", "An operator with its operands.")
      .def(
          "__init__",
          [](rbln::CommandSpec* self, std::string op,
             std::vector<std::optional<rbln::TensorSpec>> tensors,
             std::map<std::string, double> numbers, std::string text, bool by_token) {
            new (self) rbln::CommandSpec{std::move(op), std::move(tensors), std::move(numbers),
                                         std::move(text), by_token};
          },
          nb::arg("op"), nb::arg("tensors"), nb::arg("numbers") = std::map<std::string, double>{},
          nb::arg("text") = "", nb::arg("by_token") = false);

  nb::class_<rbln::Program>(m, "Program", "Checked commands over base regions.")
      .def(
          "__init__",
          [](rbln::Program* self, const std::vector<rbln::CommandSpec>& commands,
             std::vector<int64_t> bases, const std::string& isa) {
            new (self) rbln::Program(commands, std::move(bases), rbln::kernels_for(isa));
          },
          nb::arg("commands"), nb::arg("bases"), nb::arg("isa"))
      .def("bind", &rbln::Program::bind, nb::arg("base"), nb::arg("pointer"), nb::arg("size"))
      .def("run", &rbln::Program::run, nb::arg("pool"), nb::arg("tokens") = INT64_MAX,
           nb::call_guard<nb::gil_scoped_release>());

  nb::class_<rbln::KvCopier>(m, "KVCopier", "Copies heads of KV blocks, in every layer.")
      .def(
          "__init__",
          [](rbln::KvCopier* self, const std::vector<Three>& layers, int64_t blocks,
             int64_t block_size) {
            new (self) rbln::KvCopier(each(layers, kv_layer_of), blocks, block_size);
          },
          nb::arg("layers"), nb::arg("blocks"), nb::arg("block_size"))
      .def(
          "copy",
          [](const rbln::KvCopier& self, rbln::Pool& pool, const std::vector<Three>& copies) {
            self.copy(pool, each(copies, kv_copy_of));
          },
          nb::arg("pool"), nb::arg("copies"), nb::call_guard<nb::gil_scoped_release>());
}
