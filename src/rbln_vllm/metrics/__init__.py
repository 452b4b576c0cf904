# SPDX-License-Identifier: Apache-2.0
"""Numbers about programs, from the worker to the server's /metrics."""
