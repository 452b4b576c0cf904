# SPDX-License-Identifier: Apache-2.0
"""Sampling: tokens from logits, by sampler programs where they can and vLLM's code where not."""

from rbln_vllm.worker.sampling.keys import DrawKeys
from rbln_vllm.worker.sampling.programs import SamplerPrograms
from rbln_vllm.worker.sampling.sampler import ProgramSampler, SeededSampler

__all__ = ["DrawKeys", "ProgramSampler", "SamplerPrograms", "SeededSampler"]
