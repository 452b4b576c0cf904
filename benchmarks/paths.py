# SPDX-License-Identifier: Apache-2.0
"""Where the benchmarks keep what they make: all of it below `.cache`, which git ignores."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
ENVIRONMENTS = CACHE / "bench-envs"
MODELS = CACHE / "bench-models"
LOGS = CACHE / "bench" / "logs"
COMPILE_CACHES = CACHE / "bench" / "compile-caches"
RESULTS = ROOT / "benchmarks" / "results"
