# SPDX-License-Identifier: Apache-2.0
"""The systems that are compared: a row of data each."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.paths import COMPILE_CACHES, ENVIRONMENTS, ROOT

OURS = "ours"


@dataclass(frozen=True)
class System:
    """One engine.

    `driver` is a module below `benchmarks/engines`; `environment` a folder that `peers.py` fills,
    or empty for the interpreter that runs the benchmark; `model_format` a key of
    `models.MAKERS`, or "hf" for the model as it is; `comparable` says whether weights and precision
    are the same as ours.
    """

    name: str
    label: str
    driver: str
    model_format: str
    environment: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    comparable: bool = True

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"{self.name!r} must be usable as a file name")

    @property
    def python(self) -> Path:
        if not self.environment:
            return Path(sys.executable)
        return ENVIRONMENTS / self.environment / "bin" / "python"

    def missing(self) -> str | None:
        """Why the system cannot run here, in words, or None."""
        if self.python.exists():
            return None
        where = self.python.parent.parent.relative_to(ROOT)
        return f"{self.label} is not installed in {where}: `make peers`"

    def command(self, settings: str) -> list[str]:
        """The driver with its settings; it runs in the project's root."""
        return [str(self.python), "-m", f"benchmarks.engines.{self.driver}", settings]

    def process_variables(self, kv_gib: int, compile_cache: Path | None = None) -> dict[str, str]:
        """Environment of the system's processes; a compile cache of its own, kept by default."""
        cache = compile_cache or COMPILE_CACHES / self.name
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TQDM_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            **self.variables,
        }


def _all_cpus() -> str:
    return ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0)))


# No plugin is named "", so vLLM loads none and finds its own platform; the drivers check that.
_UPSTREAM = {"VLLM_PLUGINS": ""}

SYSTEMS = {
    system.name: system
    for system in (
        System(OURS, "rbln-vllm", "ours", "hf"),
        System("vllm_cpu", "vLLM CPU", "vllm_cpu", "hf", variables=_UPSTREAM),
        # By default vLLM keeps one core free of computing; with this variable it uses all.
        System(
            "vllm_cpu_all",
            "vLLM CPU, bound to all cores",
            "vllm_cpu",
            "hf",
            variables={**_UPSTREAM, "VLLM_CPU_OMP_THREADS_BIND": _all_cpus()},
        ),
        System("openvino", "OpenVINO GenAI", "openvino", "openvino", environment="openvino"),
        System("llama_cpp", "llama.cpp, bf16", "llama_cpp", "gguf", environment="llama_cpp"),
        System(
            "llama_cpp_q4",
            "llama.cpp, 4 bit",
            "llama_cpp",
            "gguf_q4",
            environment="llama_cpp",
            comparable=False,
        ),
    )
}
