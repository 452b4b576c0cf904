# SPDX-License-Identifier: Apache-2.0
"""Train an EAGLE-3 drafter for a Llama-like model, on text that the model writes itself.

usage: train_eagle3.py MODEL OUT [--sequences N] [--tokens N] [--vocab N] [--epochs N] [--seed N]

One decoder layer reads the hidden states of three of the model's layers and guesses the model's
own greedy tokens, out of the --vocab tokens that it writes most (Li et al., arXiv 2503.01840). The
drafter's own states stand in for the model's in the second pass of training, as they do in drafts
after the first.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

ASKED = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "What are the main facts about {}?",
    "Give five tips about {}.",
    "Write an email to a friend about {}.",
    "Why does {} matter?",
    "Describe {} in one paragraph.",
    "What is the history of {}?",
    "Compare {} with something similar.",
    "Write a Python function that has to do with {}.",
)
TOPICS = [
    "the moon",
    "rain",
    "bread",
    "trains",
    "money",
    "music",
    "chess",
    "the heart",
    "gardens",
    "volcanoes",
    "dogs",
    "paper",
    "sleep",
    "the sea",
    "bicycles",
    "maps",
    "friendship",
    "electricity",
    "tea",
    "insects",
    "mountains",
    "books",
    "football",
    "painting",
    "time",
    "computers",
    "salt",
    "bridges",
    "birds",
    "schools",
    "winter",
    "cities",
    "glass",
    "the sun",
    "languages",
    "rivers",
    "clocks",
    "cooking",
    "elections",
    "dreams",
    "forests",
    "numbers",
    "planes",
    "medicine",
    "fishing",
    "stars",
    "coffee",
    "photographs",
    "deserts",
    "cheese",
]


@dataclass(frozen=True)
class Text:
    """A prompt and the model's greedy answer, ``answer`` tokens of ``tokens_L``."""

    tokens_L: list[int]
    answer: int


@dataclass(frozen=True)
class Read:
    """What training needs of a text: the states of the model's three layers, and the place in the
    drafter's vocabulary of the token that follows each of an answer, NOTHING where there is none.
    """

    tokens_L: Tensor
    states_LW: Tensor
    wanted_L: Tensor
    answer: int


PASSES = 2
NOTHING = -100
"""As a wanted token: cross entropy passes over it."""


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sequences", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=160, help="of each answer")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    texts = written_texts(options.model, options.sequences, options.tokens)
    drafter = Drafter(options.model, kept_tokens(texts, options.vocab))
    train(drafter, [drafter.read(text) for text in texts], options.epochs)
    drafter.save(options.model, options.out)


def written_texts(model: Path, count: int, tokens: int) -> list[Text]:
    """What the model answers, greedily, to ``count`` different prompts."""
    from vllm import LLM, SamplingParams

    asked = [form.format(topic) for form in ASKED for topic in TOPICS]
    chats: Any = [[{"role": "user", "content": text}] for text in random.sample(asked, count)]
    llm = LLM(str(model), max_model_len=512, max_num_seqs=32)
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=tokens))
    return [
        Text([*(o.prompt_token_ids or []), *o.outputs[0].token_ids], len(o.outputs[0].token_ids))
        for o in outputs
    ]


def kept_tokens(texts: list[Text], size: int) -> Tensor:
    """The ``size`` most frequent tokens, ascending."""
    counts = Counter(token for text in texts for token in text.tokens_L)
    rest = (token for token in range(10**9) if token not in counts)
    common = [token for token, _ in counts.most_common(size)]
    return torch.tensor(sorted(common + [next(rest) for _ in range(size - len(common))]))


class Drafter(nn.Module):
    """The drafter over whole sequences; submodules are called as in its checkpoint."""

    def __init__(self, model: Path, kept_D: Tensor) -> None:
        super().__init__()
        target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self.target = [target]  # in a list: no submodule, not trained
        self.config, self.kept_D = target.config, kept_D
        config = self.config
        self.layers = (2, config.num_hidden_layers // 2, config.num_hidden_layers - 3)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        size = config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.q = nn.Linear(2 * hidden, self.heads * size, bias=False)
        self.k = nn.Linear(2 * hidden, self.kv_heads * size, bias=False)
        self.v = nn.Linear(2 * hidden, self.kv_heads * size, bias=False)
        self.o = nn.Linear(self.heads * size, hidden, bias=False)
        self.mlp = LlamaMLP(config)
        self.input_norm, self.hidden_norm, self.post_norm, self.norm = (
            LlamaRMSNorm(hidden, eps) for _ in range(4)
        )
        self.lm_head = nn.Linear(hidden, len(kept_D), bias=False)
        self.lm_head.weight.data = target.lm_head.weight.data[kept_D].float()
        self.rotary = LlamaRotaryEmbedding(config)

    @torch.no_grad()
    def read(self, text: Text) -> Read:
        """Run the target over a text once: all of training works on what it says."""
        target, tokens_L = self.target[0], torch.tensor(text.tokens_L)
        output = target.model(tokens_L[None], output_hidden_states=True)
        states_LW = torch.cat([output.hidden_states[layer][0] for layer in self.layers], dim=-1)
        greedy_L = target.lm_head(output.last_hidden_state[0]).argmax(dim=-1)
        place_V = torch.full((self.config.vocab_size,), NOTHING)
        place_V[self.kept_D] = torch.arange(len(self.kept_D))
        wanted_L = place_V[greedy_L]
        wanted_L[: len(tokens_L) - text.answer] = NOTHING
        return Read(tokens_L, states_LW, wanted_L, text.answer)

    def forward(self, tokens_BL: Tensor, states_BLH: Tensor) -> Tensor:
        """States to carry on, of each token beside the state of the one before it."""
        embeds_BLH = self.target[0].model.embed_tokens(tokens_BL).detach().float()
        sides = torch.cat((self.input_norm(embeds_BLH), self.hidden_norm(states_BLH)), dim=-1)
        x_BLH = states_BLH + self._attend(sides)
        carried: Tensor = x_BLH + self.mlp(self.post_norm(x_BLH))
        return carried

    def _attend(self, sides: Tensor) -> Tensor:
        batch, length, _ = sides.shape
        query, key, value = (
            part(sides).view(batch, length, heads, -1).transpose(1, 2)
            for part, heads in (
                (self.q, self.heads),
                (self.k, self.kv_heads),
                (self.v, self.kv_heads),
            )
        )
        cos, sin = self.rotary(sides, torch.arange(length)[None])
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.o(attended.transpose(1, 2).reshape(batch, length, -1))
        return out

    def save(self, model: Path, out: Path) -> None:
        """The checkpoint as vLLM reads it."""
        out.mkdir(parents=True, exist_ok=True)
        config = json.loads((model / "config.json").read_text()) | {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            "draft_vocab_size": len(self.kept_D),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.layers)},
        }
        (out / "config.json").write_text(json.dumps(config, indent=1))
        names = {
            "fc": self.fc,
            "midlayer.self_attn.q_proj": self.q,
            "midlayer.self_attn.k_proj": self.k,
            "midlayer.self_attn.v_proj": self.v,
            "midlayer.self_attn.o_proj": self.o,
            "midlayer.mlp.gate_proj": self.mlp.gate_proj,
            "midlayer.mlp.up_proj": self.mlp.up_proj,
            "midlayer.mlp.down_proj": self.mlp.down_proj,
            "midlayer.input_layernorm": self.input_norm,
            "midlayer.hidden_norm": self.hidden_norm,
            "midlayer.post_attention_layernorm": self.post_norm,
            "norm": self.norm,
            "lm_head": self.lm_head,
        }
        weights = {f"{name}.weight": part.weight.data.bfloat16() for name, part in names.items()}
        weights["d2t"] = self.kept_D - torch.arange(len(self.kept_D))
        save_file(weights, out / "model.safetensors")


def train(drafter: Drafter, texts: list[Read], epochs: int, batch: int = 8) -> None:
    """Two passes a step: on the model's states, then on the drafter's own."""
    trained = list(drafter.parameters())
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95))
    texts = sorted(texts, key=lambda text: len(text.tokens_L))
    batches = [texts[i : i + batch] for i in range(0, len(texts), batch)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-3, total_steps=epochs * len(batches), pct_start=0.1
    )
    for epoch in range(epochs):
        started, found = time.monotonic(), Counter[str]()
        for chosen in random.sample(batches, len(batches)):
            loss = losses(drafter, chosen, found)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 0.5)
            optimizer.step()
            schedule.step()
        rates = [found[f"right{number}"] / found["all"] for number in range(PASSES)]
        print(
            f"epoch {epoch}: right {', '.join(f'{rate:.2f}' for rate in rates)}, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )


def losses(drafter: Drafter, texts: list[Read], found: Counter[str]) -> Tensor:
    """Cross entropy with the model's greedy tokens, of those that the drafter has."""
    tokens_BL, wanted_BL, states_BLW = (
        nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)
        for parts, value in (
            ([text.tokens_L for text in texts], 0),
            ([text.wanted_L for text in texts], NOTHING),
            ([text.states_LW.float() for text in texts], 0.0),
        )
    )
    found["all"] += sum(text.answer for text in texts)
    # Place i reads token i + 1 beside state i, and guesses token i + 2.
    carried, total = drafter.fc(states_BLW), torch.zeros(())
    for number in range(PASSES):
        read_BL, aims_BL = tokens_BL[:, number + 1 :], wanted_BL[:, number + 1 :]
        carried = drafter(read_BL, carried[:, : read_BL.shape[1]])
        logits = drafter.lm_head(drafter.norm(carried))
        aims_N = aims_BL.flatten()
        total = total + functional.cross_entropy(logits.flatten(0, 1), aims_N, ignore_index=NOTHING)
        found[f"right{number}"] += int((logits.argmax(-1) == aims_BL).sum())
    return total


if __name__ == "__main__":
    main()
