# SPDX-License-Identifier: Apache-2.0
"""From an ``nn.Module`` to an artifact on disk: capture, passes, artifact, cache."""
