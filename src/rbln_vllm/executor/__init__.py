# SPDX-License-Identifier: Apache-2.0
"""Executors: how the engine's loop reaches the worker."""
