# SPDX-License-Identifier: Apache-2.0
"""Which operators a program may hold: computations on tensors and nothing else."""

import pytest
import torch

from rbln_host.compiler.operators import is_pure, is_uninitialised, may_alias, resolve
from rbln_host.errors import ArtifactError


@pytest.mark.parametrize(
    ("operator", "overload"),
    [
        ("aten::add", "Tensor"),
        ("aten::linear", "default"),
        ("aten::split", "Tensor"),
        ("aten::add", "out"),
        ("aten::empty", "memory_format"),
        ("aten::__and__", "Tensor"),
        ("rbln::write_kv", "default"),
        ("rbln::paged_attention", "default"),
        ("rbln::rms_norm", "default"),
    ],
)
def test_allowed(operator: str, overload: str) -> None:
    assert resolve(operator, overload)._schema.name == operator


@pytest.mark.parametrize(
    ("operator", "overload", "reason"),
    [
        ("os::system", "default", "outside the namespaces"),
        ("prim::Print", "default", "outside the namespaces"),
        ("aten", "default", "outside the namespaces"),
        ("aten.add", "Tensor", "outside the namespaces"),
        ("aten::", "default", "outside the namespaces"),
        ("aten::add.Tensor", "default", "outside the namespaces"),
        ("aten::add::x", "Tensor", "outside the namespaces"),
        ("aten::\ud800", "default", "outside the namespaces"),
        ("aten::no_such_operator", "default", "does not exist"),
        ("aten::add", "NoSuchOverload", "does not exist"),
        ("aten::add", "__class__", "does not exist"),
        ("aten::__class__", "default", "does not exist"),
        ("aten::__init__", "default", "does not exist"),
        ("aten::name", "default", "does not exist"),
        ("aten::_dir", "default", "does not exist"),
        ("rbln::nothing", "default", "does not exist"),
        # Files, storages, generators.
        ("aten::from_file", "default", "may not be used"),
        ("aten::set_", "source_Storage", "may not be used"),
        ("aten::set_", "source_Tensor", "may not be used"),
        ("aten::set_data", "default", "may not be used"),
        ("aten::resize_", "default", "may not be used"),
        ("aten::as_strided", "default", "may not be used"),
        ("aten::record_stream", "default", "may not be used"),
        ("aten::rand", "generator", "may not be used"),
        # TorchScript's functions, which are reachable by the same names.
        ("aten::save", "default", "may not be used"),
        ("aten::warn", "default", "may not be used"),
        ("aten::manual_seed", "default", "may not be used"),
        ("aten::set_grad_enabled", "default", "may not be used"),
        ("aten::dict", "default", "may not be used"),
        ("aten::format", "default", "may not be used"),
        ("aten::as_tensor", "list", "may not be used"),
        ("aten::_no_grad_zero_", "default", "may not be used"),
        # No tensor comes out.
        ("aten::_print", "default", "may not be used"),
        ("aten::item", "default", "may not be used"),
        ("aten::sym_size", "int", "may not be used"),
        ("aten::equal", "default", "may not be used"),
        ("aten::_backward", "default", "may not be used"),
    ],
)
def test_refused(operator: str, overload: str, reason: str) -> None:
    with pytest.raises(ArtifactError, match=reason):
        resolve(operator, overload)


def test_every_allowed_operator_of_torch_returns_tensors() -> None:
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::"):
            continue
        try:
            function = resolve(schema.name, schema.overload_name or "default")
        except ArtifactError:
            continue
        results = [str(result.type) for result in function._schema.returns]
        assert results
        assert set(results) <= {"Tensor", "List[Tensor]"}


@pytest.mark.parametrize(
    ("operator", "overload", "pure"),
    [
        ("aten::add", "Tensor", True),
        ("aten::view", "default", True),
        ("aten::add_", "Tensor", False),
        ("aten::add", "out", False),
        ("aten::empty_like", "default", False),
        ("aten::new_empty", "default", False),
        ("aten::rand", "default", False),
        ("aten::dropout", "default", False),
        ("rbln::write_kv", "default", False),
        ("rbln::paged_attention", "default", True),
    ],
)
def test_pure(operator: str, overload: str, pure: bool) -> None:
    assert is_pure(operator, overload) is pure


def test_uninitialised() -> None:
    assert is_uninitialised("aten::empty_like")
    assert not is_uninitialised("aten::zeros")


@pytest.mark.parametrize(
    ("operator", "overload", "alias"),
    [
        ("aten::view", "default", True),
        ("aten::split", "Tensor", True),
        ("aten::chunk", "default", True),
        ("aten::to", "dtype", True),
        ("aten::add_", "Tensor", True),
        # Undeclared: they may return their input or a view of it.
        ("aten::dropout", "default", True),
        ("aten::type_as", "default", True),
        ("aten::einsum", "default", True),
        ("aten::meshgrid", "default", True),
        ("aten::add", "Tensor", False),
        ("aten::linear", "default", False),
        ("aten::embedding", "default", False),
        ("aten::lift_fresh_copy", "default", False),
        ("rbln::paged_attention", "default", False),
        ("rbln::fused_add_rms_norm", "default", False),
    ],
)
def test_may_alias(operator: str, overload: str, alias: bool) -> None:
    assert may_alias(operator, overload) is alias
