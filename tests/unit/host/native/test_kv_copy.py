# SPDX-License-Identifier: Apache-2.0
"""Copies of KV blocks: the right tokens of every head and layer, and nothing beside them."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rbln_host import _native
from rbln_host.runtime.executable import Executable
from rbln_host.runtime.kv_copy import KVCopyOrder
from rbln_host.runtime.options import Executor, ExecutorOptions
from tests.unit.host.native.programs import CPUS

BLOCKS, BLOCK = 6, 8
SERIAL, SHARED = 4, 16384
"""Widths with which a copy of half a block is small, and large enough for several threads."""

each_executor = pytest.mark.parametrize("executor", list(Executor))
copy_orders = st.lists(
    st.tuples(
        st.integers(0, BLOCKS - 1),
        st.integers(0, BLOCKS - 1),
        st.sampled_from([1, 2, BLOCK - 1, BLOCK]),
    ),
    max_size=8,
)


def new_pool(width: int, heads: tuple[int, ...] = (2, 3, 2)) -> dict[str, Tensor]:
    """A tensor per layer; no value is there twice."""
    layers, first = {}, 0
    for index, count in enumerate(heads):
        size = BLOCKS * count * BLOCK * width
        values = torch.arange(first, first + size, dtype=torch.float64)
        layers[f"kv_{index}"] = values.view(BLOCKS, count, BLOCK, width)
        first += size
    return layers


def executable(executor: Executor, layers: dict[str, Tensor], threads: int = 2) -> Executable:
    cpus = tuple(CPUS[:threads])
    made = Executable(ExecutorOptions(executor, cpus))
    made.bind_kv(layers)
    return made


def copied(layers: dict[str, Tensor], copies: list[KVCopyOrder]) -> dict[str, Tensor]:
    """What must be there afterwards, token by token."""
    expected = {name: tensor.clone() for name, tensor in layers.items()}
    for source, target, tokens in copies:
        for tensor in expected.values():
            for head in range(tensor.shape[1]):
                for token in range(tokens):
                    tensor[target, head, token] = tensor[source, head, token]
    return expected


def check(executor: Executor, width: int, copies: list[KVCopyOrder]) -> None:
    layers = new_pool(width)
    expected = copied(layers, copies)
    executable(executor, layers).copy_kv(copies)
    for name, tensor in layers.items():
        assert torch.equal(tensor, expected[name]), name


@each_executor
@pytest.mark.parametrize("width", [SERIAL, SHARED])
@pytest.mark.parametrize("tokens", [1, 2, BLOCK - 1, BLOCK])
def test_first_tokens_of_every_head_and_layer(executor: Executor, width: int, tokens: int) -> None:
    check(executor, width, [(1, BLOCKS - 1, tokens), (BLOCKS - 1, 0, tokens), (2, 3, BLOCK)])


@each_executor
@given(copies=copy_orders)
def test_any_copies_in_their_order(executor: Executor, copies: list[KVCopyOrder]) -> None:
    check(executor, SERIAL, copies)


@pytest.mark.parametrize("threads", [1, 2])
def test_chains_on_several_threads(threads: int) -> None:
    """A block that was just written is the next source, whichever thread copies which head."""
    copies = [(i % BLOCKS, (i + 1) % BLOCKS, BLOCK - i % 3) for i in range(2 * BLOCKS)]
    layers = new_pool(SHARED)
    expected = copied(layers, copies)
    executable(Executor.NATIVE, layers, threads).copy_kv(copies)
    assert all(torch.equal(layers[name], expected[name]) for name in layers)


@each_executor
def test_memory_of_several_layers_is_copied_once(executor: Executor) -> None:
    layers = new_pool(SERIAL, heads=(2,))
    layers["kv_1"] = layers["kv_0"].view(BLOCKS, 2, BLOCK, SERIAL)
    made = executable(executor, layers)
    made.copy_kv([(1, 2, 3)])
    assert torch.equal(layers["kv_0"][2, :, :3], layers["kv_0"][1, :, :3])


@each_executor
@pytest.mark.parametrize(
    ("order", "error", "words"),
    [
        ((-1, 1, 1), IndexError, f"block -1 is not one of the {BLOCKS} blocks"),
        ((1, BLOCKS, 1), IndexError, f"block {BLOCKS} is not one"),
        ((1 << 62, 1, 1), IndexError, "is not one of"),
        ((1, 2, 0), ValueError, f"0 tokens are not 1 to {BLOCK}"),
        ((1, 2, -3), ValueError, "-3 tokens"),
        ((1, 2, BLOCK + 1), ValueError, f"{BLOCK + 1} tokens"),
    ],
)
def test_wrong_orders_copy_nothing(
    executor: Executor, order: KVCopyOrder, error: type[Exception], words: str
) -> None:
    """Nor do the right ones before them in the same call."""
    layers = new_pool(SERIAL)
    before = {name: tensor.clone() for name, tensor in layers.items()}
    with pytest.raises(error, match=words):
        executable(executor, layers).copy_kv([(1, 2, BLOCK), order])
    assert all(torch.equal(layers[name], before[name]) for name in layers)


@each_executor
@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([], "at least one layer"),
        ([torch.zeros(2, 3, 4)], "four axes"),
        ([torch.zeros(2, 3, 4, 10)[..., :5]], "without gaps"),
        ([torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 8, 5)], "differ in their blocks"),
    ],
    ids=str,
)
def test_what_is_no_pool(executor: Executor, layers: list[Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        executable(executor, {str(index): layer for index, layer in enumerate(layers)})


def test_before_a_pool_is_bound() -> None:
    with pytest.raises(ValueError, match="bind_kv comes first"):
        Executable().copy_kv([(1, 2, 3)])


@pytest.mark.parametrize(
    ("layer", "blocks", "block_size"),
    [
        ((0, 2, 8), 2, 4),
        ((64, 0, 8), 2, 4),
        ((64, 2, -8), 2, 4),
        ((64, 2, 8), 0, 4),
        ((64, 2, 8), 2, 0),
    ],
)
def test_sizes_that_cannot_be(layer: tuple[int, int, int], blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="KV pool: "):
        _native.KVCopier([layer], blocks, block_size)


def test_copies_while_others_do() -> None:
    """Callers in several threads, each on blocks of its own."""
    layers = new_pool(SHARED)
    expected = copied(layers, [(0, 1, BLOCK), (2, 3, BLOCK), (4, 5, BLOCK)])
    made = executable(Executor.NATIVE, layers)

    def repeat(source: int) -> None:
        for _ in range(4):
            made.copy_kv([(source, source + 1, BLOCK)])

    callers = [threading.Thread(target=repeat, args=(source,)) for source in (0, 2, 4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert all(torch.equal(layers[name], expected[name]) for name in layers)
