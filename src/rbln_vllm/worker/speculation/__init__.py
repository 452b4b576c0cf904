# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: what drafters are given, and how their drafts are verified."""
