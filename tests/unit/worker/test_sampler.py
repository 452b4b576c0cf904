# SPDX-License-Identifier: Apache-2.0
"""Which path a step's parameters take, and that a row gets the same tokens on both."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path as File
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from rbln_host.ops import mask_tokens, sample
from rbln_vllm.programs import ProgramTable
from rbln_vllm.worker.sampling import DrawKeys, ProgramSampler, SamplerPrograms, SeededSampler
from rbln_vllm.worker.sampling.bitmasks import batch_bitmask
from rbln_vllm.worker.sampling.keys import mixed, signed
from rbln_vllm.worker.sampling.paths import (
    PARAMETERS,
    Path,
    is_built_in,
    reasons,
    rows_changed_by,
)

ROWS, VOCABULARY = 3, 70
CPU = torch.device("cpu")
TABLE = ProgramTable(chunk=4, decode_buckets=(1, 2, 4), block_size=4, num_blocks_per_seq=2)


class FakeStore:
    """Runs the eager operators in place of programs, and notes which."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rows: list[int] = []
        self.executable = self

    def ensure(self, _key: object) -> None:
        pass

    def run(self, name: str, inputs: Mapping[str, Tensor], rows: int) -> tuple[Tensor, ...]:
        self.names.append(name)
        self.rows.append(rows)
        logits = inputs["logits"]
        assert len({tensor.shape[0] for tensor in inputs.values()}) == 1
        if name.startswith("mask"):
            mask_tokens(inputs["bitmask"], logits)
            return ()
        assert inputs["position"][rows:].tolist() == [-1] * (logits.shape[0] - rows)
        return sample(
            logits,
            inputs["temperature"],
            inputs["top_k"],
            inputs["top_p"],
            inputs["seed"],
            inputs["position"],
            inputs.get("bitmask"),
        )


class Fixture:
    """A sampler over three requests with seeds 11, 12 and none, that have 0, 4 and 7 tokens."""

    def __init__(self, kind: type[SeededSampler] = ProgramSampler, mode: str = "raw_logprobs"):
        self.requests = {
            f"r{row}": SimpleNamespace(sampling_params=SamplingParams(seed=seed))
            for row, seed in enumerate((11, 12, None))
        }
        self.batch = SimpleNamespace(
            req_ids=["r0", "r1", "r2"],
            num_prompt_tokens=np.array([5, 2, 1, 99], dtype=np.int32),
            num_tokens_no_spec=np.array([5, 6, 8, 0], dtype=np.int32),
        )
        self.store = FakeStore()
        self.keys = DrawKeys(self.requests, lambda: self.batch, 0)
        programs: Any = SamplerPrograms(TABLE, self.store)  # type: ignore[arg-type]
        config: Any = SimpleNamespace(logprobs_mode=mode, use_fp64_gumbel=False)
        self.greedy_R = torch.tensor([7, 8, 9])
        more = (lambda: self.greedy_R,) if kind is ProgramSampler else ()
        self.sampler = kind(config, programs, self.keys, *more)


def logits_of(seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(ROWS, VOCABULARY, generator=generator)).to(dtype)


def metadata(**changes: Any) -> SamplingMetadata:
    """Three greedy rows that ask for nothing else."""
    zeros = torch.zeros(ROWS)
    plain = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=zeros,
        presence_penalties=zeros,
        repetition_penalties=zeros + 1,
        output_token_ids=[[], [], []],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([bias(), min_tokens(), min_p()]),
    )
    return replace(plain, **changes)


def sampled(**changes: Any) -> SamplingMetadata:
    """The first and the last row draw, the second is greedy."""
    temperature = torch.tensor([0.8, 0.0, 1.3])
    return metadata(**{"temperature": temperature, "all_greedy": False, **changes})


def bias(biases: dict[int, dict[int, float]] | None = None) -> LogitBiasLogitsProcessor:
    processor = LogitBiasLogitsProcessor(None, CPU, False)
    if biases:
        processor.biases = biases
        rows = [row for row, one in biases.items() for _ in one]
        ids = [token for one in biases.values() for token in one]
        values = [value for one in biases.values() for value in one.values()]
        processor.logits_slice = (torch.tensor(rows), torch.tensor(ids))
        processor.bias_tensor = torch.tensor(values)
    return processor


def min_tokens(rows: dict[int, Any] | None = None) -> MinTokensLogitsProcessor:
    config: Any = SimpleNamespace()
    processor = MinTokensLogitsProcessor(config, CPU, False)
    processor.min_toks = rows or {}
    return processor


def min_p(values: list[float] | None = None) -> MinPLogitsProcessor:
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=ROWS))
    processor = MinPLogitsProcessor(config, CPU, False)
    if values:
        processor.min_p_count = sum(value > 0 for value in values)
        processor.min_p = torch.tensor(values).unsqueeze(1)
    return processor


class Adapter(AdapterLogitsProcessor):
    """With processors of some requests, by row."""

    def __init__(self, rows: dict[int, Any]) -> None:
        config: Any = SimpleNamespace()
        super().__init__(config, CPU, False)
        self.req_info = rows

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: object) -> None:
        return None


HOLDER = SimpleNamespace(has_tracked_requests=lambda: True)
CHANGES: dict[str, dict[str, Any]] = {
    "presence_penalty": {"no_penalties": False},
    "logit_bias": {"logitsprocs": LogitsProcessors([bias({0: {1: 2.0}})])},
    "min_tokens": {"logitsprocs": LogitsProcessors([min_tokens({0: (1, [], set(), False)})])},
    "bad_words": {"bad_words_token_ids": {0: [[1]]}},
    "allowed_token_ids": {
        "allowed_token_ids_mask": torch.zeros(ROWS, VOCABULARY, dtype=torch.bool)
    },
    "logprobs": {"max_num_logprobs": 0},
    "logprob_token_ids": {"logprob_token_ids": {0: [1]}},
    "thinking_token_budget": {"thinking_budget_state_holder": HOLDER},
}


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


class TestGreedy:
    def test_the_logits_programs_tokens_are_taken(self) -> None:
        fixture = Fixture()
        output = fixture.sampler(logits_of(), metadata())
        assert output.sampled_token_ids.tolist() == [[7], [8], [9]]
        assert output.sampled_token_ids.dtype == torch.int32
        assert fixture.store.names == []

    def test_not_where_the_logits_are_others(self) -> None:
        fixture = Fixture()
        fixture.greedy_R = torch.tensor([7])
        output = fixture.sampler(logits_of(), metadata())
        assert output.sampled_token_ids[:, 0].tolist() == logits_of().argmax(-1).tolist()
        assert fixture.store.names == ["sampler_b4_q1"]

    def test_not_where_a_grammar_forbids(self) -> None:
        fixture = Fixture()
        bitmask = torch.full((ROWS, 3), -1, dtype=torch.int32)
        bitmask[1] = torch.tensor([0, 1 << 4, 0])
        fixture.sampler.constrain(bitmask)
        tokens = fixture.sampler(logits_of(), metadata()).sampled_token_ids[:, 0].tolist()
        best = logits_of().argmax(-1).tolist()
        assert tokens == [best[0], 36, best[2]]
        later = fixture.sampler(logits_of(), metadata()).sampled_token_ids[:, 0].tolist()
        assert later == [7, 8, 9], "a mask is of one step"

    def test_a_mask_does_not_stay(self) -> None:
        fixture = Fixture()
        fixture.sampler.constrain(torch.zeros(ROWS, 3, dtype=torch.int32) + 2)
        fixture.sampler(logits_of(), sampled())
        free = fixture.sampler(logits_of(), sampled()).sampled_token_ids
        assert free.tolist() == Fixture().sampler(logits_of(), sampled()).sampled_token_ids.tolist()


NEUTRAL: dict[str, dict[str, Any]] = {
    "logprobs": {"max_num_logprobs": 2},
    "logit_bias": {"logitsprocs": LogitsProcessors([bias({0: {1: 0.0}})])},
    "min_p": {"logitsprocs": LogitsProcessors([min_p([1e-30, 0, 0])])},
    "allowed_token_ids": CHANGES["allowed_token_ids"],
}
"""What sends a step to vLLM's path and changes nothing."""


class TestPaths:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", NEUTRAL)
    def test_a_row_gets_the_same_tokens_on_both(self, name: str, dtype: torch.dtype) -> None:
        limits = {
            "top_k": torch.tensor([20, VOCABULARY, 40]).int(),
            "top_p": torch.tensor([0.9, 1.0, 0.95]),
        }
        for step in range(30):
            by_path = []
            for changes in ({}, NEUTRAL[name]):
                fixture = Fixture()
                fixture.batch.num_tokens_no_spec += step
                output = fixture.sampler(logits_of(step, dtype), sampled(**limits, **changes))
                by_path.append(output.sampled_token_ids.tolist())
                kinds = {name.partition("_")[0] for name in fixture.store.names}
                assert kinds == ({"draw"} if changes else {"sampler"})
            assert by_path[0] == by_path[1]

    def test_greedy_rows_beside_others(self) -> None:
        fixture = Fixture()
        for changes in ({}, NEUTRAL["logprobs"]):
            output = fixture.sampler(logits_of(), sampled(**changes))
            assert output.sampled_token_ids[1].item() == logits_of()[1].argmax()

    def test_masks_come_before_vllms_processing(self) -> None:
        fixture = Fixture()
        fixture.sampler.constrain(torch.tensor([[-1] * 3, [16, 0, 0], [-1] * 3]).int())
        output = fixture.sampler(logits_of(), sampled(max_num_logprobs=1))
        assert output.sampled_token_ids[1].item() == 4
        assert output.logprobs_tensors.logprobs[1].tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("kind", ["logprobs", "logits"])
    def test_processed_scores_end_where_draws_do(self, kind: str) -> None:
        fixture = Fixture(mode=f"processed_{kind}")
        limits = {"top_k": torch.tensor([3, VOCABULARY, 3]).int(), "max_num_logprobs": 5}
        output = fixture.sampler(logits_of(), sampled(**limits))
        scores = output.logprobs_tensors.logprobs[0, 1:]
        assert torch.isfinite(scores).tolist() == [True] * 3 + [False] * 2
        best = (logits_of()[0] / 0.8).topk(3).values
        expected = best.log_softmax(0) if kind == "logprobs" else best
        assert torch.allclose(scores[:3], expected)

    @pytest.mark.parametrize("kind", ["logprobs", "logits"])
    def test_raw_scores_are_of_the_logits(self, kind: str) -> None:
        fixture = Fixture(mode=f"raw_{kind}")
        output = fixture.sampler(logits_of(), sampled(max_num_logprobs=3))
        expected = logits_of().log_softmax(-1) if kind == "logprobs" else logits_of()
        assert torch.allclose(output.logprobs_tensors.logprobs[:, 1:], expected.topk(3).values)


class TestVllmsSampler:
    def test_it_samples(self) -> None:
        output = Fixture(SeededSampler).sampler(logits_of(), metadata())
        assert output.sampled_token_ids[:, 0].tolist() == logits_of().argmax(-1).tolist()

    def test_a_draw_does_not_depend_on_those_before(self) -> None:
        """Upstream's generators go on: a token that was thrown away would change the rest."""
        results = []
        for thrown_away in (0, 3):
            fixture = Fixture(SeededSampler)
            generators = {0: torch.Generator().manual_seed(11)}
            for _ in range(thrown_away + 1):
                output = fixture.sampler(logits_of(), sampled(generators=generators))
            results.append(output.sampled_token_ids[0].item())
        assert results[0] == results[1]

    def test_masks_are_applied(self) -> None:
        fixture = Fixture(SeededSampler)
        fixture.sampler.constrain(torch.tensor([[-1] * 3, [16, 0, 0], [-1] * 3]).int())
        output = fixture.sampler(logits_of(), metadata())
        assert output.sampled_token_ids[1].item() == 4

    def test_vllms_settings_are_kept(self) -> None:
        for kind in (SeededSampler, ProgramSampler):
            sampler = Fixture(kind, "processed_logits").sampler
            assert isinstance(sampler, Sampler)
            assert sampler.logprobs_mode == "processed_logits"


class TestKeys:
    def test_own_seeds_and_positions(self) -> None:
        seed_R, position_R = Fixture().keys.of_step()
        assert seed_R[:2].tolist() == [11, 12]
        assert position_R.tolist() == [0, 4, 7]
        assert seed_R.dtype == position_R.dtype == torch.int64

    def test_tokens_after_one_another(self) -> None:
        seed_R, position_R = Fixture().keys.of_step(np.array([2, 1, 3]))
        assert seed_R[:3].tolist() == [11, 11, 12]
        assert position_R.tolist() == [0, 1, 4, 7, 8, 9]
        assert seed_R.dtype == position_R.dtype == torch.int64

    def test_positions_ahead_are_those_to_come(self) -> None:
        keys = Fixture().keys
        with keys.looking_ahead(2):
            assert keys.of_step()[1].tolist() == [2, 6, 9]
        assert keys.of_step()[1].tolist() == [0, 4, 7]

    def test_others_get_one_that_stays_in_any_row(self) -> None:
        fixture = Fixture()
        first = fixture.keys.of_step()[0][2].item()
        fixture.requests["r3"] = SimpleNamespace(sampling_params=SamplingParams())
        fixture.batch.req_ids = ["r3", "r2"]
        other, again = fixture.keys.of_step()[0].tolist()
        assert again == first != other
        assert Fixture().keys.of_step()[0][2].item() == first, "of the engine's seed"

    def test_a_name_used_again_is_another_request(self) -> None:
        fixture = Fixture()
        first = fixture.keys.of_step()[0][2].item()
        gone = fixture.requests.pop("r2")
        fixture.requests["r4"] = gone
        fixture.batch.req_ids = ["r0", "r1", "r4"]
        fixture.keys.of_step()
        fixture.requests["r2"] = fixture.requests.pop("r4")
        fixture.batch.req_ids = ["r0", "r1", "r2"]
        assert fixture.keys.of_step()[0][2].item() != first

    @pytest.mark.parametrize("seed", [0, -1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
    def test_any_seed_fits(self, seed: int) -> None:
        assert signed(seed) & ((1 << 64) - 1) == seed & ((1 << 64) - 1)
        torch.tensor([signed(seed)], dtype=torch.int64)
        torch.Generator().manual_seed(mixed(signed(seed), 3))

    def test_mixed_numbers_differ(self) -> None:
        numbers = {mixed(seed, position) for seed in range(30) for position in range(30)}
        assert len(numbers) == 900


class TestBitmasks:
    def test_rows_of_the_batch(self) -> None:
        """The scheduler's order is not the batch's, and one request has left."""
        masks = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.int32)
        grammar = GrammarOutput(["b", "gone", "a"], masks)
        bitmask = batch_bitmask(grammar, {"a": 0, "free": 1, "b": 2}, 3)
        assert bitmask.tolist() == [[5, 6], [-1, -1], [1, 2]]

    def test_rows_of_drafts(self) -> None:
        """A mask for the next token and one after each draft, also of a request that has left."""
        masks = np.array([[row, -row] for row in range(1, 8)], dtype=np.int32)
        grammar = GrammarOutput(["b", "gone", "a"], masks)
        count_of = {"a": 2, "gone": 2, "b": 3, "free": 2}
        bitmask = batch_bitmask(grammar, {"a": 0, "free": 2, "b": 4}, 7, count_of)
        rows = [6, 7, None, None, 1, 2, 3]
        assert bitmask.tolist() == [[-1, -1] if row is None else [row, -row] for row in rows]

    def test_none_left(self) -> None:
        grammar = GrammarOutput(["gone"], np.zeros((1, 2), dtype=np.int32))
        assert batch_bitmask(grammar, {"a": 0}, 1).tolist() == [[-1, -1]]


class TestBuffers:
    def test_a_logits_programs_buffer_is_used_in_place(self) -> None:
        """It has the rows of padding behind those of the step."""
        fixture = Fixture()
        buffer = torch.full((4, VOCABULARY), torch.nan)
        buffer[:ROWS] = logits_of()
        fixture.sampler.constrain(torch.zeros(ROWS, 3, dtype=torch.int32) + 16)
        fixture.sampler.mask(buffer[:ROWS])
        assert (buffer[:ROWS] > -torch.inf).sum(-1).tolist() == [3] * ROWS
        assert buffer[3].isnan().all()
        assert fixture.store.names == ["mask_b4_q1"]

    def test_others_are_copied(self) -> None:
        logits = logits_of()
        fixture = Fixture()
        fixture.sampler.constrain(torch.zeros(ROWS, 3, dtype=torch.int32) + 16)
        fixture.sampler.mask(logits)
        assert (logits > -torch.inf).sum(-1).tolist() == [3] * ROWS

    def test_draws_leave_the_logits_as_they_are(self) -> None:
        logits = logits_of()
        fixture = Fixture()
        fixture.sampler.constrain(torch.zeros(ROWS, 3, dtype=torch.int32) + 16)
        tokens = fixture.sampler(logits, sampled()).sampled_token_ids[:, 0].tolist()
        assert set(tokens) <= {4, 36, 68}
        assert torch.equal(logits, logits_of())
