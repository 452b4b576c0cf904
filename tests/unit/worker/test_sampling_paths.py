# SPDX-License-Identifier: Apache-2.0
"""Which path a step's parameters take: the table, and how it is looked up."""

import re
from collections.abc import Callable
from pathlib import Path as File
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata

from rbln_vllm.worker.sampling.paths import PARAMETERS, Path, is_built_in, reasons, rows_changed_by
from tests.unit.worker.sampling import CHANGES, CPU, Adapter, metadata, min_p, sampled


class TestTable:
    @pytest.mark.parametrize("make", [metadata, sampled])
    def test_plain_rows_are_programs(self, make: Callable[..., SamplingMetadata]) -> None:
        assert reasons(make()) == ()
        limits = {"top_k": torch.tensor([5, 70, 70]).int(), "top_p": torch.tensor([0.9, 1, 1])}
        assert reasons(make(**limits, generators={0: torch.Generator()})) == ()

    @pytest.mark.parametrize("make", [metadata, sampled])
    @pytest.mark.parametrize("name", CHANGES)
    def test_what_vllm_must_process(self, name: str, make: Callable[..., SamplingMetadata]) -> None:
        assert name in reasons(make(**CHANGES[name]))

    def test_min_p_matters_to_random_rows_alone(self) -> None:
        changes = {"logitsprocs": LogitsProcessors([min_p([0.1, 0, 0])])}
        assert reasons(metadata(**changes)) == ()
        assert reasons(sampled(**changes)) == ("min_p",)

    @pytest.mark.parametrize("invariant", [False, True])
    def test_processors_of_somebody_else_may_do_anything(self, invariant: bool) -> None:
        class Own(LogitBiasLogitsProcessor):
            def is_argmax_invariant(self) -> bool:
                return invariant

        changes = {"logitsprocs": LogitsProcessors([Own(None, CPU, False)])}
        assert reasons(sampled(**changes)) == ("extra_args",)
        assert reasons(metadata(**changes)) == (() if invariant else ("extra_args",))

    @pytest.mark.parametrize(("rows", "found"), [({}, ()), ({1: 7}, ("extra_args",))])
    def test_an_adapter_says_which_rows_it_changes(
        self, rows: dict[int, Any], found: tuple[str, ...]
    ) -> None:
        adapter = Adapter(rows)
        assert reasons(metadata(logitsprocs=LogitsProcessors([adapter]))) == found
        assert rows_changed_by(adapter) == rows.keys()
        assert not is_built_in(adapter)

    def test_one_that_changes_more_than_it_says_may_do_anything(self) -> None:
        class Own(Adapter):
            def apply(self, logits: torch.Tensor) -> torch.Tensor:
                return logits

        assert rows_changed_by(Own({})) is None
        assert reasons(metadata(logitsprocs=LogitsProcessors([Own({})]))) == ("extra_args",)

    def test_every_parameter_of_vllm_has_its_place(self) -> None:
        """A field that is new in vLLM fails here and needs a path."""
        others = {
            *("n", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "repetition_detection"),
            *("prompt_logprobs", "prompt_logprob_start", "prompt_logprob_token_ids"),
            *("detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
            *("include_stop_str_in_output", "output_kind", "stream_interval", "flat_logprobs"),
            "output_text_buffer_length",
            *("skip_clone", "skip_reading_prefix_cache", "routed_experts_prompt_start"),
            *("trace_decode_token_ids", "watermarking"),  # of vLLM's other model runner
        }
        fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
        fields = {name for name in fields if not name.endswith("_") and "bad_words_" not in name}
        assert {p.name for p in PARAMETERS} <= fields
        assert fields - {p.name for p in PARAMETERS} - others == set()

    def test_the_page_has_the_same_table(self) -> None:
        page = (File(__file__).parents[3] / "docs" / "sampling.md").read_text()
        rows = [tuple(row) for row in re.findall(r"^\| `(\w+)` \| (\w+) \|$", page, re.MULTILINE)]
        assert rows == [(p.name, str(p.path)) for p in PARAMETERS]

    def test_the_table_says_how_to_look_for_what_vllm_processes(self) -> None:
        assert all((p.path is Path.VLLM) == (p.asked is not None) for p in PARAMETERS)
