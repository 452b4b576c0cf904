# SPDX-License-Identifier: Apache-2.0
"""What tells an adapter from another of its name. Imports neither torch nor vLLM."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


def adapter_identity(adapter: "LoRARequest") -> list[Any]:
    """Name and files of an adapter, so that other weights under the same name are another one."""
    directory = Path(adapter.lora_path)
    files = sorted(path for path in directory.glob("*") if path.is_file())
    states = [(path.name, path.stat()) for path in files]
    if not states:  # not a local directory: at least separate within this process
        return [adapter.lora_name, adapter.lora_path, adapter.lora_int_id]
    return [adapter.lora_name, *((name, s.st_size, s.st_mtime_ns) for name, s in states)]


def adapter_version(adapter: "LoRARequest") -> str:
    """A short digest of its identity."""
    return str(blake3.blake3(repr(adapter_identity(adapter)).encode()).hexdigest()[:16])
