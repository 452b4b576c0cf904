# SPDX-License-Identifier: Apache-2.0
"""What pooling models ask of a configuration, of programs, of steps; see also worker/pooling."""
