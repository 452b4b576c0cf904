# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: which programs are compiled for, loading them, and their slots in programs."""
