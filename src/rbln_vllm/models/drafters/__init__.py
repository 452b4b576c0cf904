# SPDX-License-Identifier: Apache-2.0
"""Models that draft tokens for another model to verify, and the programs that run them."""
