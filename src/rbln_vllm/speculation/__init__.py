# SPDX-License-Identifier: Apache-2.0
"""Which drafters a configuration may ask for, and their programs; see also worker/speculation."""
