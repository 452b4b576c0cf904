# SPDX-License-Identifier: Apache-2.0
"""Pooling models through the engine: vectors and scores equal Hugging Face's, in any company."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from vllm import LLM, PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError

from rbln_vllm.core.encoder_scheduler import AsyncEncoderScheduler
from rbln_vllm.executor.overlapped import OverlappedExecutor
from rbln_vllm.toolchain import host_toolchain
from rbln_vllm.worker.pooling.encoder_runner import EncoderRunner
from tests.engine.engines import (
    core_of,
    counted_preemptions,
    prompt,
    report,
    runner_of,
    settle,
    started,
)
from tests.pooling_models import (
    POSITIONS,
    embedding,
    hidden_states,
    label_logits,
    minilm_dir,
    pooling_model_dir,
)

MAX_LEN, SEQS, CHUNK, BLOCK = 64, 4, 64, 32
ENCODERS: Mapping[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_LEN,
    "max_num_seqs": SEQS,
    "max_num_batched_tokens": 128,
    "disable_log_stats": True,
}
DECODERS: Mapping[str, Any] = {
    **ENCODERS,
    "max_model_len": 256,
    "max_num_batched_tokens": CHUNK,
    "block_size": BLOCK,
    "additional_config": {"optimum_overrides": {"decoder_batch_sizes": [4]}},
}
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, MAX_LEN - 1, MAX_LEN)
DECODER_LENGTHS = (1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 200, 256)
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["a", "e"],
    "is_original_qwen3_reranker": True,
}


def pooling_engine(directory: Path, **arguments: Any) -> AbstractContextManager[LLM]:
    """An engine of a pooling model with `ENCODERS`, changed by `arguments`."""
    return started(directory, **{**ENCODERS, **arguments})


def inputs(prompts: Sequence[Sequence[int]]) -> Any:
    return [{"prompt_token_ids": list(tokens)} for tokens in prompts]


def embed(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    outputs = llm.embed(inputs(prompts), use_tqdm=False)
    return [torch.tensor(output.outputs.embedding) for output in outputs]


def classify(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    outputs = llm.classify(inputs(prompts), use_tqdm=False)
    return [torch.tensor(output.outputs.probs) for output in outputs]


def assert_near(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Within 1e-4 of the largest element."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        tolerance = 1e-4 * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance, msg=f"prompt {number}")


def check_native(llm: LLM) -> None:
    """Matrix products and attention run on our kernels, and nothing was compiled late."""
    assert report(llm)["compiled_after_ready"] == 0
    artifact = runner_of(llm)._store._artifact
    assert artifact is not None
    reports = host_toolchain().explain(artifact)
    for name, found in reports.items():
        assert found.flops, name
        assert found.native_flops == found.flops, name
        assert name.startswith("head") or found.attention_flops, name
        assert not [f for f in found.fallbacks if "attention" in f.operator], name


def assert_idle(llm: LLM) -> None:
    """No request is left, neither in the scheduler nor in the runner."""
    settle(llm)
    scheduler, runner = core_of(llm).scheduler, runner_of(llm)
    assert not [*scheduler.requests, *scheduler.running, *scheduler.waiting]
    assert isinstance(runner, EncoderRunner)
    assert runner._known.keys() <= scheduler.finished_req_ids


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    return [prompt(length, seed=3) for length in lengths]


@contextmanager
def programs_run(llm: LLM) -> Iterator[list[str]]:
    """Names of the programs that run, in order."""
    executable = runner_of(llm)._store.executable
    names: list[str] = []
    run = executable.run

    def recorded(name: str, *args: Any) -> Any:
        names.append(name)
        return run(name, *args)

    with patch.object(executable, "run", recorded):
        yield names
    assert names, "no program ran"


@pytest.fixture(scope="module")
def bert(engine_environment: None) -> Iterator[LLM]:
    with pooling_engine(pooling_model_dir("BertModel")) as llm:
        yield llm


@pytest.fixture(scope="module")
def ahead(engine_environment: None) -> Iterator[LLM]:
    with pooling_engine(pooling_model_dir("BertModel"), async_scheduling=True) as llm:
        yield llm


class TestEncoders:
    def test_bert_equals_hugging_face_by_its_first_token(self, bert: LLM) -> None:
        prompts, directory = prompts_of(LENGTHS), pooling_model_dir("BertModel")
        expected = [embedding(directory, "BertModel", tokens, "cls") for tokens in prompts]
        assert_near(embed(bert, prompts), expected)
        check_native(bert)

    @pytest.mark.parametrize("architecture", ["RobertaModel", "XLMRobertaModel"])
    def test_mean_pooling_of_sentence_transformers(self, architecture: str) -> None:
        """RoBERTa's positions begin after the padding id; the config beside the model is obeyed."""
        directory, prompts = pooling_model_dir(architecture, "mean"), prompts_of(LENGTHS)
        expected = [embedding(directory, architecture, tokens, "mean") for tokens in prompts]
        with pooling_engine(directory) as llm:
            assert_near(embed(llm, prompts), expected)
            check_native(llm)

    @pytest.mark.parametrize(
        "architecture",
        [
            "BertForSequenceClassification",
            "RobertaForSequenceClassification",
            "XLMRobertaForSequenceClassification",
        ],
    )
    def test_classifiers(self, architecture: str) -> None:
        directory, prompts = pooling_model_dir(architecture), prompts_of(LENGTHS)
        expected = [label_logits(directory, architecture, tokens).softmax(0) for tokens in prompts]
        with pooling_engine(directory) as llm:
            assert_near(classify(llm, prompts), expected)
            check_native(llm)

    def test_all_tokens(self, bert: LLM) -> None:
        """Vectors of every token, not normalised, stay what they were when others come."""
        directory, prompts = pooling_model_dir("BertModel"), prompts_of((5, 40, 1))
        engine = bert.llm_engine
        found: dict[str, Tensor] = {}
        for number, item in enumerate(inputs(prompts)):
            params = PoolingParams(task="token_embed", use_activation=False)
            engine.add_request(str(number), item, params)
        while engine.has_unfinished_requests():
            found |= {output.request_id: output.outputs.data for output in engine.step()}
        embed(bert, prompts_of(LENGTHS))
        expected = [hidden_states(directory, "BertModel", tokens) for tokens in prompts]
        assert_near([found[str(number)] for number in range(len(prompts))], expected)

    def test_bf16_points_the_same_way(self) -> None:
        directory, prompts = pooling_model_dir("BertModel"), prompts_of(LENGTHS)
        with pooling_engine(directory, dtype="bfloat16") as llm:
            vectors = embed(llm, prompts)
        for tokens, vector in zip(prompts, vectors, strict=True):
            assert float(vector @ embedding(directory, "BertModel", tokens, "cls")) > 0.999


class TestCompany:
    def test_a_vector_does_not_depend_on_bucket_or_neighbours(self, bert: LLM) -> None:
        """Bit for bit: alone, with others of all lengths, first and last, again."""
        prompts = prompts_of(LENGTHS)
        alone = [embed(bert, [tokens])[0] for tokens in prompts]
        together = embed(bert, prompts)
        backwards = embed(bert, prompts[::-1])[::-1]
        for one, two, three in zip(alone, together, backwards, strict=True):
            assert torch.equal(one, two)
            assert torch.equal(one, three)

    def test_a_step_holds_many_prompts(self, bert: LLM) -> None:
        with programs_run(bert) as names:
            embed(bert, prompts_of((3, 5, 7, 9)))
        assert names == ["encoder_b4_q16"]
        with programs_run(bert) as names:
            embed(bert, prompts_of((3,)))
        assert names == ["encoder_b1_q16"]
        with programs_run(bert) as names:
            embed(bert, prompts_of((64, 64, 64, 64)))  # a step has at most 128 tokens
        assert names == ["encoder_b2_q64", "encoder_b2_q64"]

    @pytest.mark.parametrize("name", ["bert", "ahead"])
    def test_aborts_leave_the_others_alone(
        self, bert: LLM, name: str, request: pytest.FixtureRequest
    ) -> None:
        """Aborted before any step and between steps, also while a step is in flight."""
        llm: LLM = request.getfixturevalue(name)
        prompts, engine = prompts_of((64, 64, 33, 64, 17, 64)), llm.llm_engine
        expected = [embed(bert, [tokens])[0] for tokens in prompts]
        for victim in range(len(prompts)):
            ids = [
                engine.add_request(f"{victim}/{i}", item, PoolingParams(task="embed"))
                for i, item in enumerate(inputs(prompts))
            ]
            done: dict[str, Tensor] = {}
            for step in range(100):
                if step == victim % 3:
                    engine.abort_request([ids[victim]], internal=True)
                if not engine.has_unfinished_requests():
                    break
                done |= {o.request_id: o.outputs.data for o in engine.step()}
            else:
                raise AssertionError("the engine is not idle")
            for i, vector in enumerate(expected):
                found = done.get(f"{victim}/{i}")
                assert found is not None or i == victim
                assert found is None or torch.equal(found, vector)
            assert_idle(llm)


class TestAhead:
    def test_on_request(self, bert: LLM, ahead: LLM) -> None:
        assert isinstance(core_of(ahead).scheduler, AsyncEncoderScheduler)
        assert isinstance(core_of(ahead).model_executor, OverlappedExecutor)
        assert not isinstance(core_of(bert).scheduler, AsyncEncoderScheduler)
        prompts = prompts_of(LENGTHS)
        assert all(map(torch.equal, embed(ahead, prompts), embed(bert, prompts)))

    def test_preemption_leaves_no_trace(self, ahead: LLM) -> None:
        """Requests lose a step that is in flight, and are computed again."""
        prompts, engine = prompts_of((64, 64, 33, 64, 17, 64)), ahead.llm_engine
        expected = {str(i): embed(ahead, [tokens])[0] for i, tokens in enumerate(prompts)}
        for i, item in enumerate(inputs(prompts)):
            engine.add_request(str(i), item, PoolingParams(task="embed"))
        done: dict[str, Tensor] = {}
        with counted_preemptions(ahead), programs_run(ahead) as names:
            for step in range(100):
                if step in (1, 2):
                    assert engine.reset_prefix_cache(reset_running_requests=True)
                if not engine.has_unfinished_requests():
                    break
                done |= {o.request_id: o.outputs.data for o in engine.step()}
        assert done.keys() == expected.keys()
        assert all(torch.equal(done[name], vector) for name, vector in expected.items())
        assert len(names) > 4
        assert_idle(ahead)

    def test_a_step_is_scheduled_while_the_one_before_runs(self, ahead: LLM) -> None:
        """The first program waits inside for the schedule of the second step."""
        scheduler, model = core_of(ahead).scheduler, runner_of(ahead).model
        schedule, launched = scheduler.schedule, model.launched
        steps = threading.Semaphore(0)
        overlapped: list[bool] = []

        def counted_schedule(*args: Any) -> Any:
            output = schedule(*args)
            steps.release()
            return output

        def waiting_launch() -> None:
            launched()
            if not overlapped:
                overlapped.append(steps.acquire(timeout=30) and steps.acquire(timeout=30))

        with (
            patch.object(scheduler, "schedule", counted_schedule),
            patch.object(model, "launched", waiting_launch),
        ):
            embed(ahead, prompts_of((64, 64, 64)))
        assert overlapped == [True]


class TestRefusals:
    def test_too_long_and_empty(self, bert: LLM) -> None:
        assert len(embed(bert, [prompt(MAX_LEN)])) == 1
        with pytest.raises((ValueError, VLLMValidationError), match=str(MAX_LEN)):
            embed(bert, [prompt(MAX_LEN + 1)])
        with pytest.raises((ValueError, VLLMValidationError), match="empty"):
            embed(bert, [[]])
        assert len(embed(bert, [prompt(MAX_LEN)])) == 1

    def test_generation(self, bert: LLM) -> None:
        with pytest.raises(ValueError, match="generat"):
            bert.generate(inputs([prompt(3)]), SamplingParams(max_tokens=1), use_tqdm=False)

    def test_classification(self, bert: LLM) -> None:
        with pytest.raises(ValueError, match="classif"):
            classify(bert, [prompt(3)])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"model_impl": "vllm"}, "leave out --model-impl vllm"),
            ({"max_num_scheduled_tokens": MAX_LEN - 1}, "computes a prompt in one step"),
            ({"long_prefill_token_threshold": 8}, "whole prompts"),
        ],
    )
    def test_at_start(self, arguments: dict[str, Any], message: str) -> None:
        with (
            pytest.raises(ValueError, match=message),
            pooling_engine(pooling_model_dir("BertModel"), **arguments),
        ):
            pass

    def test_positions_that_roberta_does_not_have(self) -> None:
        directory, most = pooling_model_dir("RobertaModel"), POSITIONS - 2
        with (
            pytest.raises(ValueError, match=f"more than the {most} positions"),
            pooling_engine(directory, max_model_len=most + 1),
        ):
            pass

    def test_a_decoder_that_does_not_embed(self, tiny_llama_dir: Path) -> None:
        with (
            pytest.raises(ValueError, match="LlamaForCausalLM is not built for pooling"),
            pooling_engine(tiny_llama_dir, runner="pooling"),
        ):
            pass


class TestDecoders:
    @pytest.mark.parametrize("architecture", ["Qwen3Model", "Qwen3ForCausalLM"])
    def test_embeddings_are_of_the_last_token(self, architecture: str) -> None:
        """Over chunk edges; a prefix that another prompt shares changes nothing."""
        directory = pooling_model_dir(architecture)
        prompts = [*prompts_of(DECODER_LENGTHS), prompt(200, seed=3)[:130]]
        expected = [embedding(directory, architecture, tokens, "last") for tokens in prompts]
        with pooling_engine(directory, runner="pooling", **DECODERS) as llm:
            first = embed(llm, prompts)
            assert_near(first, expected)
            again = embed(llm, prompts)
            assert all(map(torch.equal, first, again))
            check_native(llm)
            assert not llm.llm_engine.vllm_config.cache_config.enable_prefix_caching

    def test_a_classifier(self) -> None:
        architecture = "Qwen3ForSequenceClassification"
        directory, prompts = pooling_model_dir(architecture), prompts_of(DECODER_LENGTHS)
        expected = [label_logits(directory, architecture, tokens).softmax(0) for tokens in prompts]
        with pooling_engine(directory, **DECODERS) as llm:
            assert_near(classify(llm, prompts), expected)

    def test_the_original_reranker(self) -> None:
        """The score is the sigmoid of the difference of two logits of the generating model."""
        directory, prompts = pooling_model_dir("Qwen3ForCausalLM"), prompts_of(DECODER_LENGTHS)
        with pooling_engine(directory, hf_overrides=RERANKER, **DECODERS) as llm:
            scores = classify(llm, prompts)
            tokenizer = llm.get_tokenizer()
            no, yes = (tokenizer.convert_tokens_to_ids(token) for token in ("a", "e"))
        logits = [label_logits(directory, "Qwen3ForCausalLM", tokens)[-1] for tokens in prompts]
        assert_near(scores, [torch.sigmoid(one[yes] - one[no])[None] for one in logits])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"is_original_qwen3_reranker": None}, "lack is_original_qwen3_reranker"),
            ({"classifier_from_token": None}, "lack classifier_from_token"),
            ({"classifier_from_token": ["a"]}, "must be two tokens"),
            ({"classifier_from_token": ["a", "e", "i"]}, "must be two tokens"),
            ({"classifier_from_token": ["a", "no such token"]}, "must be one"),
            (
                {"is_original_qwen3_reranker": None, "classifier_from_token": None},
                "no weights of a classifier",
            ),
        ],
    )
    def test_what_a_reranker_must_be_told(self, change: dict[str, Any], message: str) -> None:
        overrides = {k: v for k, v in {**RERANKER, **change}.items() if v is not None}
        with (
            pytest.raises(ValueError, match=message),
            pooling_engine(
                pooling_model_dir("Qwen3ForCausalLM"), hf_overrides=overrides, **DECODERS
            ),
        ):
            pass


def test_minilm_equals_sentence_transformers() -> None:
    """By what Sentence-Transformers does (mean, normalise), on the real model: 1e-3 in cosine."""
    directory = minilm_dir()
    texts = json.loads((Path(__file__).parent / "sentences.json").read_text())
    with pooling_engine(
        directory, max_model_len=None, max_num_batched_tokens=None, max_num_seqs=16
    ) as llm:
        outputs = llm.embed(texts, use_tqdm=False)
        assert llm.llm_engine.vllm_config.model_config.max_model_len == 256
    assert len({len(output.prompt_token_ids) for output in outputs}) > 3
    for output in outputs:
        expected = embedding(directory, "BertModel", output.prompt_token_ids, "mean")
        cosine = float(torch.tensor(output.outputs.embedding) @ expected)
        assert 1 - cosine < 1e-3
