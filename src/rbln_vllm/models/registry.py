# SPDX-License-Identifier: Apache-2.0
"""Which architectures the transformers implementation has. A table; empty until it is built."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# False: selecting the transformers implementation is refused in words.
TRANSFORMERS_BUILT = False


@dataclass(frozen=True)
class TransformersModel:
    """One architecture: the class (`module:Name`) that builds its programs."""

    architecture: str
    builder: str


# Hugging Face architecture name -> entry. `--model-impl auto` prefers what is listed here.
REGISTRY: Mapping[str, TransformersModel] = MappingProxyType({})
