# SPDX-License-Identifier: Apache-2.0
"""Repairs of an installation of vLLM for CPU: `python -m rbln_vllm.setup_env`.

The default package registry serves a vLLM for CPU whose own `vllm` command cannot start and
companions of torch built for CUDA. What is wrong is looked for, mended where it can be, and said.
"""
