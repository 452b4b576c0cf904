# SPDX-License-Identifier: Apache-2.0
"""Prefix caching at sub-block grain in the scheduler's process.

vLLM matches prefixes by whole blocks, and an RBLN block is large. Here every multiple of the
sub-block inside a block can be matched, and the matched head of the block is copied.
"""
