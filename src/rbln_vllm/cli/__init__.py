# SPDX-License-Identifier: Apache-2.0
"""The command ``rbln-vllm``: vLLM's own commands on any installation, and ours."""
