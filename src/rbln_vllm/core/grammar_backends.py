# SPDX-License-Identifier: Apache-2.0
"""Each request's grammar is compiled by the backend that accepted it.

With the backend ``auto`` vLLM finds one for each request, xgrammar where it can, but an engine
compiles all of them with that of the first: xgrammar then leaves out silently what it does not know
(``multipleOf``), or fails, though guidance had accepted the request.
"""

import copy
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllm.v1.structured_output import StructuredOutputManager

if TYPE_CHECKING:
    from vllm.v1.request import Request


class GrammarBackends:
    """Stands for a manager's ``grammar_init``: a copy of the manager for each backend compiles.

    Masks are all in the memory that the first backend has allocated, of 32 tokens a number as all
    of them write; a request for a backend whose masks are longer, of a tokenizer larger than the
    model's vocabulary, fails.
    """

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager
        self._copies: dict[str, StructuredOutputManager] = {}

    def __call__(self, request: "Request") -> None:
        """Begin to compile the grammar of a request, if it has one."""
        constraint = request.sampling_params and request.sampling_params.structured_outputs
        if request.structured_output_request is None or constraint is None:
            return
        name = str(constraint._backend)
        if name not in self._copies:
            self._copies[name] = copy.copy(self._manager)
            self._copies[name].backend = None
        own = self._copies[name]
        StructuredOutputManager.grammar_init(own, request)
        if self._manager.backend is None:
            self._manager.backend = own.backend
        if own.backend is not self._manager.backend and (
            _mask_length(own) != _mask_length(self._manager)
        ):
            request.structured_output_request.grammar = _failed(
                f"the masks of {name} and of the backend of earlier requests differ in length: "
                'choose one by --structured-outputs-config \'{"backend": "..."}\''
            )


def use_backends_of_requests(manager: StructuredOutputManager) -> None:
    """Have a manager, in which nothing is compiled yet, compile by each request's backend."""
    manager.grammar_init = GrammarBackends(manager)


def _mask_length(manager: StructuredOutputManager) -> int:
    assert manager.backend is not None
    return int(manager.backend.allocate_token_bitmask(1).shape[-1])


def _failed(reason: str) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_exception(ValueError(reason))
    return future
