# SPDX-License-Identifier: Apache-2.0
"""The ahead-of-time API generates what Hugging Face generates, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rbln_vllm.optimum import (
    RBLNAutoModelForCausalLM,
    RBLNLlamaForCausalLM,
    RBLNQwen3ForCausalLM,
)
from tests.engine.engines import BLOCK, CHUNK, MAX_LEN, prompt

SIZES: dict[str, Any] = {
    "rbln_batch_size": 4,
    "rbln_max_seq_len": MAX_LEN,
    "rbln_prefill_chunk_size": CHUNK,
    "rbln_kvcache_block_size": BLOCK,
    "rbln_decoder_batch_sizes": [1, 2],
}
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1)


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask, as a tokenizer gives them."""
    width = max(map(len, prompts))
    ids = torch.tensor([[2] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def hugging_face(directory: Path) -> Any:
    """The reference; only its eager attention has soft caps and sinks."""
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(directory, **options).eval()


@pytest.fixture(scope="module")
def model(tiny_llama_dir: Path) -> Any:
    return RBLNLlamaForCausalLM.from_pretrained(tiny_llama_dir, **SIZES)


@pytest.fixture(scope="module")
def reference(tiny_llama_dir: Path) -> Any:
    return hugging_face(tiny_llama_dir)


@pytest.mark.parametrize(
    "name", ["Gemma2ForCausalLM", "OPTForCausalLM", "GPT2LMHeadModel", "GptOssForCausalLM"]
)
def test_architectures_generate_as_hugging_face(
    tiny_model_dir: Callable[..., Path], name: str
) -> None:
    directory = tiny_model_dir(name)
    compiled = RBLNAutoModelForCausalLM.from_pretrained(directory, **SIZES)
    assert type(compiled).__name__ == f"RBLN{name}"
    ids, mask = left_padded([prompt(length, seed=7) for length in LENGTHS])
    theirs = hugging_face(directory)
    wanted = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    torch.testing.assert_close(compiled.generate(ids, **wanted), theirs.generate(ids, **wanted))


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_batches_generate_greedily(model: Any, reference: Any, rows: int) -> None:
    """Ragged prompts over the edges of chunk and block, in every bucket."""
    ids, mask = left_padded([prompt(length, seed=rows) for length in LENGTHS[-rows:]])
    wanted = {"attention_mask": mask, "max_new_tokens": BLOCK + 2, "do_sample": False}
    ours = model.generate(ids, **wanted)
    torch.testing.assert_close(ours, reference.generate(ids, **wanted))


def test_logits_are_hugging_faces(model: Any, reference: Any) -> None:
    ids = torch.tensor([prompt(CHUNK + 1)])
    ours = model(ids)
    assert ours.logits.shape == (1, 1, 512)
    torch.testing.assert_close(ours.logits, reference(ids).logits[:, -1:], rtol=1e-4, atol=1e-4)
    again = model(torch.tensor([[7]]), past_key_values=ours.past_key_values)
    longer = reference(torch.cat((ids, torch.tensor([[7]])), dim=1)).logits[:, -1:]
    torch.testing.assert_close(again.logits, longer, rtol=1e-4, atol=1e-4)


def test_sampling_follows_the_seed(model: Any, reference: Any) -> None:
    ids = torch.tensor([prompt(9)])
    wanted = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.3, "top_k": 40}
    drawn = []
    for each in (model, reference, model):
        torch.manual_seed(5)
        drawn.append(each.generate(ids, num_return_sequences=2, **wanted))
    torch.testing.assert_close(drawn[0], drawn[1])
    torch.testing.assert_close(drawn[0], drawn[2])
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_a_conversation_goes_on_from_its_cache(model: Any, reference: Any) -> None:
    first = torch.tensor([prompt(20)])
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    told = model.generate(first, **options)
    whole = torch.cat((told.sequences, torch.tensor([prompt(3, seed=1)])), dim=1)
    cache = told.past_key_values
    assert cache.get_seq_length() == told.sequences.shape[1] - 1
    expected = reference.generate(whole, max_new_tokens=4, do_sample=False)
    ours = model.generate(whole, past_key_values=cache, max_new_tokens=4, do_sample=False)
    torch.testing.assert_close(ours, expected)


def test_the_longest_sequence_and_one_more(model: Any, reference: Any) -> None:
    ids = torch.tensor([prompt(MAX_LEN - 3)])
    wanted = {"do_sample": False, "eos_token_id": None}
    ours = model.generate(ids, max_new_tokens=3, **wanted)
    torch.testing.assert_close(ours, reference.generate(ids, max_new_tokens=3, **wanted))
    with pytest.raises(ValueError, match=f"{MAX_LEN + 1} tokens are longer than .* {MAX_LEN}"):
        model.generate(ids, max_new_tokens=4, **wanted)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_return_sequences": 5, "do_sample": True}, "5 sequences are more than the .* 4"),
        ({"num_beams": 2}, "only supports"),
        ({"max_new_token": 3}, "not used by the model"),
    ],
)
def test_what_generate_refuses(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model.generate(torch.tensor([prompt(4)]), **options)


def test_a_row_of_padding_is_refused(model: Any) -> None:
    mask = torch.tensor([[1, 1], [0, 0]])
    with pytest.raises(ValueError, match="row 1 has no token that is not padding"):
        model(torch.tensor([[5, 6], [2, 2]]), attention_mask=mask)


def test_saved_and_loaded(model: Any, tmp_path: Path, tiny_llama_dir: Path) -> None:
    ids = torch.tensor([prompt(CHUNK)])
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    loaded = RBLNAutoModelForCausalLM.from_pretrained(saved, rbln_batch_size=4)
    assert type(loaded) is RBLNLlamaForCausalLM
    assert loaded.rbln_config == model.rbln_config
    assert loaded.rbln_config.decoder_batch_sizes == (4, 2, 1)
    torch.testing.assert_close(loaded.generate(ids, max_new_tokens=4, do_sample=False), expected)
    with pytest.raises(FileExistsError, match="the model's own directory"):
        loaded.save_pretrained(saved)
    with pytest.raises(ValueError, match="push_to_hub is not supported"):
        loaded.save_pretrained(saved, push_to_hub=True)
    with pytest.raises(NameError, match="for RBLNLlamaForCausalLM, not for RBLNQwen3ForCausalLM"):
        RBLNQwen3ForCausalLM.from_pretrained(saved)
    with pytest.raises(ValueError, match="batch_size is 4 in the compiled model, not 2"):
        RBLNLlamaForCausalLM.from_pretrained(saved, rbln_batch_size=2)
    with pytest.raises(ValueError, match="is a compiled model, which has no weights"):
        RBLNLlamaForCausalLM.from_pretrained(saved, export=True)
    with pytest.raises(FileNotFoundError, match="is not a compiled directory"):
        RBLNLlamaForCausalLM.from_pretrained(tiny_llama_dir, export=False)


def test_without_runtimes_it_is_saved_and_not_run(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Compiled where it is to stay, naively, in another type."""
    made = RBLNLlamaForCausalLM.from_pretrained(
        tiny_llama_dir,
        rbln_config={"create_runtimes": False, "attn_impl": "eager", "max_seq_len": 128},
        model_save_dir=tmp_path / "kept",
        dtype="bfloat16",
    )
    with pytest.raises(RuntimeError, match="create_runtimes=False: it can be saved, but not run"):
        made.generate(torch.tensor([[5]]), max_new_tokens=1)
    loaded = RBLNLlamaForCausalLM.from_pretrained(tmp_path / "kept")
    assert loaded.dtype == torch.bfloat16
    assert (loaded.rbln_config.attn_impl, loaded.rbln_config.kvcache_block_size) == ("eager", 128)
    assert loaded.generate(torch.tensor([[5]]), max_new_tokens=1).shape == (1, 2)


def test_a_model_in_memory_is_compiled(reference: Any, tmp_path: Path) -> None:
    made = RBLNLlamaForCausalLM.from_model(reference, model_save_dir=tmp_path / "kept", **SIZES)
    ids, wanted = torch.tensor([prompt(CHUNK + 1)]), {"max_new_tokens": 4, "do_sample": False}
    torch.testing.assert_close(made.generate(ids, **wanted), reference.generate(ids, **wanted))
    assert (tmp_path / "kept" / "rbln_config.json").is_file()


def test_keywords_of_hugging_face(tiny_llama_dir: Path) -> None:
    small = RBLNAutoModelForCausalLM.from_pretrained(
        tiny_llama_dir, num_hidden_layers=1, rbln_create_runtimes=False
    )
    assert small.config.num_hidden_layers == 1
    with pytest.raises(TypeError, match=r"no arguments max_seq_len: options .* begin with rbln_"):
        RBLNAutoModelForCausalLM.from_pretrained(tiny_llama_dir, max_seq_len=4)


def test_smollm2_generates_as_hugging_face(smollm2_dir: Path) -> None:
    """A real model in fp32."""
    model = RBLNAutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32, **SIZES)
    theirs = hugging_face(smollm2_dir)
    ids, mask = left_padded([prompt(5), prompt(CHUNK + 1)])
    wanted = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    torch.testing.assert_close(model.generate(ids, **wanted), theirs.generate(ids, **wanted))


class TestEmbeddings:
    """A model that takes embeddings generates from them, and from tokens, as Hugging Face does."""

    @pytest.fixture(scope="class", params=["LlamaForCausalLM", "GemmaForCausalLM"])
    def pair(self, request: pytest.FixtureRequest, tiny_model_dir: Callable[..., Path]) -> Any:
        """Gemma scales its embeddings."""
        directory = tiny_model_dir(request.param)
        model = RBLNAutoModelForCausalLM.from_pretrained(
            directory, rbln_use_inputs_embeds=True, **SIZES
        )
        return model, hugging_face(directory)

    @pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK + 1])
    def test_equal_hugging_face(self, pair: Any, length: int) -> None:
        model, reference = pair
        ids = torch.tensor([prompt(length), prompt(length, seed=1)])
        embeds = reference.get_input_embeddings()(ids).detach()
        torch.testing.assert_close(model.get_input_embeddings()(ids), embeds)
        changed = embeds + 0.1 * torch.randn(embeds.shape, generator=torch.manual_seed(3))
        wanted = {"max_new_tokens": 6, "do_sample": False}
        ours = model.generate(inputs_embeds=changed, **wanted)
        torch.testing.assert_close(ours, reference.generate(inputs_embeds=changed, **wanted))
        torch.testing.assert_close(model.generate(ids, **wanted), reference.generate(ids, **wanted))

    def test_padding_on_the_left(self, pair: Any) -> None:
        model, reference = pair
        ids, mask = left_padded([prompt(5), prompt(CHUNK + 1)])
        embeds = reference.get_input_embeddings()(ids).detach()
        wanted = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
        ours = model.generate(inputs_embeds=embeds, **wanted)
        torch.testing.assert_close(ours, reference.generate(inputs_embeds=embeds, **wanted))

    def test_one_of_tokens_or_embeddings(self, pair: Any, model: Any) -> None:
        ids = torch.tensor([prompt(4)])
        for both in ({}, {"input_ids": ids, "inputs_embeds": torch.zeros(1, 4, 64)}):
            with pytest.raises(ValueError, match="give either input_ids or inputs_embeds"):
                pair[0](**both)
        with pytest.raises(ValueError, match="compile it with use_inputs_embeds"):
            model.generate(inputs_embeds=torch.zeros(1, 4, 64), max_new_tokens=1)
        with pytest.raises(ValueError, match="compile it with use_inputs_embeds"):
            model.get_input_embeddings()
