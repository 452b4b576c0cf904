# SPDX-License-Identifier: Apache-2.0
"""Compiling a request's constraint as the engine would, to see whether that ends."""

import pickle
import time
from typing import TYPE_CHECKING

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, validate_xgrammar_grammar
from vllm.v1.structured_output.request import get_structured_output_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PARSE_SECONDS = 1.0
"""Processor time that reading a grammar may take: vLLM reads it while all other requests wait."""

NO_TEXT = "the grammar allows no text at all: give each of its recursions an end"


class XgrammarCheck:
    """Called with what ``given`` has made of a constraint: the reason why it cannot be compiled,
    nothing if it can.

    What vLLM refuses by itself, or leaves to another backend, passes: guidance compiles as it goes
    and has limits of its own.
    """

    def __init__(self, config: "VllmConfig") -> None:
        self._backend = XgrammarBackend(
            config,
            tokenizer=cached_tokenizer_from_config(config.model_config),
            vocab_size=config.model_config.get_vocab_size(),
        )

    def __call__(self, given: bytes) -> str:
        params = SamplingParams(structured_outputs=pickle.loads(given))  # from our own process
        began = time.process_time()
        try:
            is_valid = _is_valid(params)
        except ValueError as error:  # of what never reaches xgrammar's parser
            return str(error)
        if time.process_time() - began > PARSE_SECONDS:
            return f"the grammar takes more than {PARSE_SECONDS:g} s to read; make it smaller"
        return self._compile(params) if is_valid else ""

    def _compile(self, params: SamplingParams) -> str:
        assert params.structured_outputs is not None
        try:
            constraint = get_structured_output_key(params.structured_outputs)
            grammar = self._backend.compile_grammar(*constraint)
        except (MemoryError, RuntimeError, TypeError, ValueError) as error:
            return f"the grammar cannot be compiled: {error}"
        allowed = self._backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(allowed, 0)
        return "" if allowed.any() else NO_TEXT


def given(constraint: StructuredOutputsParams) -> bytes:
    """What a check is told of a constraint; RecursionError for one that nests too deep."""
    return pickle.dumps(constraint)


def _is_valid(params: SamplingParams) -> bool:
    """Whether xgrammar takes it. A choice becomes a grammar by this."""
    try:
        validate_xgrammar_grammar(params)
    except VLLMValidationError:
        return False
    return True
