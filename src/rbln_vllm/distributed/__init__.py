# SPDX-License-Identifier: Apache-2.0
"""What crosses the border of one engine."""
