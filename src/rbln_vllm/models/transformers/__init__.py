# SPDX-License-Identifier: Apache-2.0
"""The ``transformers`` implementation: Hugging Face's own modules, captured as programs.

Their attention is one registered function that emits ``rbln::`` operators; everything else is
theirs, and from capture on it is the same compiler, runtime and cache as for vLLM's modules.
Nothing here needs an engine: a :class:`~rbln_vllm.models.transformers.source.ModelSource` and a
geometry are enough.
"""
