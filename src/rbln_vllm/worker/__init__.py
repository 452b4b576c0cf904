# SPDX-License-Identifier: Apache-2.0
"""One worker process: builds or loads programs, stages inputs, runs steps."""
