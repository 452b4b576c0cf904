# SPDX-License-Identifier: Apache-2.0
"""Model implementations: how an architecture becomes programs."""
