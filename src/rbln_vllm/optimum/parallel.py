# SPDX-License-Identifier: Apache-2.0
"""Compile programs in several processes.

The model is loaded once: worker processes are forked and read the same memory. What comes back
from them is the program; its weights are looked up in the model by their names, and only
constants, which are small, are sent.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
from torch import Tensor

from rbln_vllm.optimum.builders import AheadBuilder
from rbln_vllm.programs import ProgramKey
from rbln_vllm.toolchain import Adapters, Captured, CaptureError, Toolchain


@dataclass(frozen=True)
class _Sent:
    """A program without the model's weights; ``constants`` as bytes, shape and dtype."""

    graph: Any
    weights: tuple[str, ...]
    constants: dict[str, tuple[bytes, tuple[int, ...], torch.dtype]]
    adapters: Adapters | None


def compile_programs(
    builder: AheadBuilder,
    keys: Sequence[ProgramKey],
    toolchain: Toolchain,
    workers: int = 1,
) -> Iterator[Captured]:
    """Every program, in any order.

    CaptureError when one cannot be compiled; RuntimeError when a worker process dies.
    """
    if workers < 1:
        raise ValueError(f"programs are compiled by one process at least, not by {workers}")
    workers = min(workers, len(keys))
    if workers == 1:
        yield from builder.compile(keys, toolchain)
        return
    named = builder.named_weights()
    fork = multiprocessing.get_context("fork")
    pipes: dict[Connection, Any] = {}
    try:
        for number in range(workers):
            ours, theirs = fork.Pipe(duplex=False)
            arguments = (builder, keys[number::workers], toolchain, theirs)
            process = fork.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes[ours] = process
        yield from _received(dict(pipes), named)
    finally:
        for connection, process in pipes.items():
            process.terminate()
            process.join()
            connection.close()


def _received(pipes: dict[Connection, Any], named: dict[str, Tensor]) -> Iterator[Captured]:
    while pipes:
        for connection in wait(list(pipes)):
            assert isinstance(connection, Connection)
            try:
                message = connection.recv()
            except EOFError:
                raise RuntimeError("a worker process died while it compiled") from None
            if message is None:
                del pipes[connection]
            elif isinstance(message, CaptureError):
                raise message
            else:
                yield _whole(cast(_Sent, message), named)


def _work(
    builder: AheadBuilder,
    keys: Sequence[ProgramKey],
    toolchain: Toolchain,
    results: Connection,
) -> None:
    """In a worker process."""
    # OpenMP's threads did not come along; one thread needs none.
    torch.set_num_threads(1)
    named = builder.named_weights()
    try:
        for item in builder.compile(keys, toolchain):
            results.send(_without_weights(item, named))
        results.send(None)
    except CaptureError as error:
        results.send(error)


def _without_weights(item: Captured, named: dict[str, Tensor]) -> _Sent:
    constants = {
        name: (
            tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
            tuple(tensor.shape),
            tensor.dtype,
        )
        for name, tensor in item.weights.items()
        if name not in named
    }
    weights = tuple(name for name in item.weights if name in named)
    return _Sent(item.graph, weights, constants, item.adapters)


def _whole(sent: _Sent, named: dict[str, Tensor]) -> Captured:
    weights = {name: named[name] for name in sent.weights}
    for name, (data, shape, dtype) in sent.constants.items():
        weights[name] = torch.empty(shape, dtype=dtype)
        if data:
            filled = weights[name].view(-1).view(torch.uint8)
            filled.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return Captured(sent.graph, weights, sent.adapters)
