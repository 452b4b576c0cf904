# SPDX-License-Identifier: Apache-2.0
"""KV offload to memory and disk, over vLLM's OffloadingConnector.

vLLM decides which blocks are stored and keeps the books of the memory tier. Here are the copies
between the pool and that tier (``worker``), the directory on disk below it (``disk_tier``,
``disk_store``, ``block_file``) and the choice between loading and computing (``planner``).
"""
