# SPDX-License-Identifier: Apache-2.0
"""KV connectors: KV blocks that leave the pool and come back."""
