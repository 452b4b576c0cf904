# SPDX-License-Identifier: Apache-2.0
"""The gate of an API server: a request whose grammar does not compile in time is answered with 400.

vLLM parses a grammar before it accepts a request and compiles it in the engine, where one that
takes minutes can only end as an error. Here it is compiled first, in a process that can be ended.
"""

import asyncio
import functools
import hashlib
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from rbln_vllm import envs
from rbln_vllm.grammars.fork_server import GIB, MEMORY_BYTES, PASSED, ForkServer
from rbln_vllm.grammars.xgrammar_check import XgrammarCheck, given
from rbln_vllm.startup.start_method import engines_may_fork

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")

CHECKS_AT_ONCE = 2
REMEMBERED = 1024
"""Grammars whose verdict is known."""


class GrammarGate:
    """Lets in requests without a grammar, and with one that compiles within ``seconds``."""

    def __init__(self, server: ForkServer, seconds: float) -> None:
        self._server, self._seconds = server, seconds
        self._places = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._verdicts: LRUCache[bytes, str] = LRUCache(REMEMBERED)

    async def admit(self, params: object) -> None:
        """Return once the grammar of ``params``, if any, is known to compile.

        Raises VLLMValidationError, which the server answers with 400, when it does not. Other
        requests go on meanwhile.
        """
        constraint = params.structured_outputs if isinstance(params, SamplingParams) else None
        if constraint is None or constraint.json_object:
            return
        reason = await self._verdict(constraint)
        if reason:
            raise VLLMValidationError(reason, parameter="structured_outputs")

    def close(self) -> None:
        self._server.close()

    async def _verdict(self, constraint: StructuredOutputsParams) -> str:
        try:
            told = given(constraint)
        except RecursionError:  # vLLM has a limit for nesting, and words for it
            return ""
        key = hashlib.sha256(told).digest()
        if key not in self._verdicts:
            try:
                async with self._places:
                    self._verdicts[key] = await self._check(told)
            except OSError as error:
                logger.warning_once("grammars are no longer checked: %s", error)
                return ""
        return self._verdicts[key]

    async def _check(self, told: bytes) -> str:
        reader, writer = await asyncio.open_unix_connection(sock=self._server.open())
        try:
            writer.write(told)
            writer.write_eof()
            answer = await reader.read()
        except ConnectionError:
            answer = b""
        finally:
            writer.close()
        if not answer:
            return (
                f"the grammar was not compiled within {self._seconds:g} s and "
                f"{MEMORY_BYTES / GIB:g} GiB of memory; make it smaller: fewer or shorter "
                "alternatives, lower bounds of repetition"
            )
        return "" if answer == PASSED else answer[1:].decode()


def gate_of(config: "VllmConfig") -> GrammarGate | None:
    """The gate of an API server with this configuration; None where no grammar is xgrammar's."""
    if config.model_config.skip_tokenizer_init or config.model_config.runner_type != "generate":
        return None
    if config.structured_outputs_config.backend not in ("auto", "xgrammar"):
        return None
    seconds = envs.grammar_seconds()
    if not seconds:
        return None
    make_check = functools.partial(XgrammarCheck, config)
    return GrammarGate(ForkServer(make_check, seconds, may_fork=engines_may_fork()), seconds)


def _write_schema_as_text(params: object) -> None:
    """A schema may hold integers beyond 64 bits, which messages to the engine cannot.

    Text can, and the engine makes text of a schema anyway.
    """
    constraint = params.structured_outputs if isinstance(params, SamplingParams) else None
    if constraint is not None and isinstance(constraint.json, dict):
        with suppress(RecursionError):  # vLLM has a limit for nesting, and words for it
            constraint.json = json.dumps(constraint.json)


def install(engine_class: Any) -> None:
    """Put a gate before vLLM's ``AsyncLLM``, see ``shims.py``."""
    make, add_request = engine_class.__init__, engine_class.add_request
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def with_gate(self: Any, vllm_config: "VllmConfig", *args: Any, **kwargs: Any) -> None:
        self.rbln_gate = gate_of(vllm_config)  # before there are threads
        make(self, vllm_config, *args, **kwargs)

    @functools.wraps(add_request)
    async def admitted(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        _write_schema_as_text(params)
        if self.rbln_gate is not None:
            await self.rbln_gate.admit(params)
        return await add_request(self, request_id, prompt, params, *args, **kwargs)

    engine_class.__init__, engine_class.add_request = with_gate, admitted
