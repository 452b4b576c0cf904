# SPDX-License-Identifier: Apache-2.0
"""Compiled pooling models that run by themselves, as Hugging Face's models do.

They take what a tokenizer gives and return what Transformers' classes of the same name return.
How a vector is made of hidden states is the caller's affair, or vLLM's when the model is served.
"""

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput

from rbln_vllm.optimum.base import NO_RUNTIME, RBLNModel
from rbln_vllm.optimum.request import Opened
from rbln_vllm.optimum.texts import ClassifierRows, DecoderTexts, EncoderTexts, Text, TextRunner


class _PoolingModel(RBLNModel):
    """Computes any number of texts of up to ``max_seq_len`` tokens, ``batch_size`` at a time."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._runner: TextRunner | None = None
        if not opened.create_runtimes:
            return
        executable = self._new_executable()
        if self.rbln_config.architecture.encoder:
            self._runner = EncoderTexts(executable, self._geometry)
        else:
            layers = opened.directory.kv_layers
            self._runner = DecoderTexts(executable, self._geometry, layers)
        if self.rbln_config.architecture.classifies:
            self._head = ClassifierRows(executable, self._geometry)

    def _hidden_states(
        self, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None
    ) -> list[Tensor]:
        """``[n, hidden]`` of the tokens of each row that are not padding."""
        if self._runner is None:
            raise RuntimeError(NO_RUNTIME)
        types_BS = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        present_BS = _present(input_ids, attention_mask).numpy()
        rows = zip(input_ids.numpy(), types_BS.numpy(), present_BS, strict=True)
        texts = [Text(ids_S[here_S], types_S[here_S]) for ids_S, types_S, here_S in rows]
        self._check_lengths(texts)
        return self._runner.hidden_states(texts)

    def _check_lengths(self, texts: list[Text]) -> None:
        longest = max(map(len, texts))
        if longest > self._geometry.max_model_len:
            raise ValueError(
                f"{longest} tokens are more than the model's max_seq_len "
                f"{self._geometry.max_model_len}: truncate the text, or compile it for more"
            )


class RBLNModelForFeatureExtraction(_PoolingModel):
    """A compiled model without a head: hidden states of every token."""

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        return_dict: bool = True,
    ) -> BaseModelOutputWithPooling:
        """``last_hidden_state`` ``[B, S, hidden]`` of ``input_ids`` ``[B, S]``, 0 where
        ``attention_mask`` is. There is no ``pooler_output``.

        A token's position is the number of tokens before it that are not padding. ValueError for a
        row without a token and for one that is too long, RuntimeError for a model without runtimes.
        """
        found = self._hidden_states(input_ids, attention_mask, token_type_ids)
        hidden_BSH = torch.zeros(*input_ids.shape, found[0].shape[-1], dtype=found[0].dtype)
        hidden_BSH[_present(input_ids, attention_mask)] = torch.cat(found)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_BSH)


class RBLNModelForSequenceClassification(_PoolingModel):
    """A compiled classifier."""

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        return_dict: bool = True,
    ) -> SequenceClassifierOutput:
        """``logits`` ``[B, labels]`` of ``input_ids`` ``[B, S]``, before any activation.

        Of an original Qwen3-Reranker the one logit is how much rather it says yes than no. Raises
        as :class:`RBLNModelForFeatureExtraction`.
        """
        found = self._hidden_states(input_ids, attention_mask, token_type_ids)
        place = 0 if self.rbln_config.architecture.encoder else -1
        pooled_BH = torch.stack([hidden_NH[place] for hidden_NH in found])
        return SequenceClassifierOutput(logits=self._head.logits(pooled_BH))


def _present(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Which tokens are no padding, bool ``[B, S]``."""
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    return attention_mask.bool()
