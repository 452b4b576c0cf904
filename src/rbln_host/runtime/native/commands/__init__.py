# SPDX-License-Identifier: Apache-2.0
"""What native commands do the work of a program's: one module per family of operators."""
