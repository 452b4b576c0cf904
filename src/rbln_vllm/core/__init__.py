# SPDX-License-Identifier: Apache-2.0
"""Scheduling policy: which requests run in a step, and which are refused.

Nothing here imports torch or knows a tensor; the runner in ``rbln_vllm.worker`` reads the
same ``SchedulerOutput`` through :func:`rbln_vllm.core.step.classify`.
"""
