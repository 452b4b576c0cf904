# SPDX-License-Identifier: Apache-2.0
"""What a compiled model depends on: its content and the switches it was traced under."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3

from rbln_vllm.geometry import Geometry, geometry_of
from rbln_vllm.lora.shape import AdapterShape
from rbln_vllm.models.select import implementation_of
from rbln_vllm.sources import digest_packages
from rbln_vllm.speculation.draft_models import drafts_by_program
from rbln_vllm.startup.model_impl import ARTIFACT_MANIFEST, is_compiled_directory
from rbln_vllm.toolchain import CacheKey, Toolchain, compiled_with

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_NOT_CONTENT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


def cache_key(
    vllm_config: "VllmConfig", toolchain: Toolchain, digest_of: Callable[[Path], str]
) -> CacheKey:
    """The key of this configuration's artifact. It holds contents and sizes, never a path.

    ``digest_of`` gives the digest of a file's content.

    The set of programs is not part of it: an entry grows when more shapes are asked for.
    """
    model = vllm_config.model_config
    return CacheKey(
        label=f"{Path(model.model).name}",
        parts={
            "model_content": model_content(model, vllm_config.load_config.load_format, digest_of),
            "architecture": model.architecture,
            "implementation": implementation_of(vllm_config),
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
            "quantization": str(model.quantization),
            **_drafter_parts(vllm_config, digest_of),
            **_adapter_parts(vllm_config),
            **_geometry_parts(geometry_of(vllm_config)),
            **_version_parts(toolchain),
        },
    )


def _drafter_parts(vllm_config: "VllmConfig", digest_of: Callable[[Path], str]) -> dict[str, str]:
    """Of a model that drafts. Its programs share weights with the target's and lie beside them."""
    if not drafts_by_program(vllm_config):
        return {}
    speculation = vllm_config.speculative_config
    assert speculation is not None
    load = speculation.draft_load_config or vllm_config.load_config
    drafter = speculation.draft_model_config
    return {
        "draft_method": str(speculation.method),
        "draft_content": model_content(drafter, load.load_format, digest_of),
    }


def _adapter_parts(vllm_config: "VllmConfig") -> dict[str, str]:
    shape = AdapterShape.of(vllm_config)
    return {} if shape is None else {"adapters": shape.key}


def _geometry_parts(geometry: Geometry) -> dict[str, str]:
    # Programs have the same names, whatever they take.
    inputs = {"inputs": "embeddings"} if geometry.takes_embeds else {}
    return {
        **inputs,
        "profile": geometry.profile.name,
        "num_devices": "1",
        "block_size": str(geometry.block_size),
        "max_model_len": str(geometry.max_model_len),
    }


def _version_parts(toolchain: Toolchain) -> dict[str, str]:
    import transformers
    import vllm

    import rbln_vllm.models

    return {
        "toolchain": f"{toolchain.name} {toolchain.version}",
        "model_code": digest_packages((rbln_vllm.models,)),
        "vllm": vllm.__version__,
        "transformers": transformers.__version__,
        **{name: str(version) for name, version in compiled_with().items()},
    }


def model_content(model: "ModelConfig", load_format: str, digest_of: Callable[[Path], str]) -> str:
    """Digest of the model's configuration (after overrides) and of its weight files."""
    if is_compiled_directory(str(model.model)):
        return digest_of(Path(model.model) / ARTIFACT_MANIFEST)  # it holds those of all files
    hasher = blake3.blake3()
    hasher.update(_config_text(model.hf_config.to_dict()).encode())
    if load_format == "dummy":
        hasher.update(b"dummy weights")
        return str(hasher.hexdigest())
    for path in weight_files(model):
        hasher.update(f"{path.name} {digest_of(path)}\n".encode())
    return str(hasher.hexdigest())


def _config_text(config: dict[str, Any]) -> str:
    return json.dumps(_content_of(config), sort_keys=True, default=str)


def _content_of(value: Any) -> Any:
    """``value`` without the names and paths that configurations carry at every level."""
    if isinstance(value, dict):
        return {k: _content_of(v) for k, v in value.items() if k not in _NOT_CONTENT}
    return value


def weight_files(model: "ModelConfig") -> list[Path]:
    """The checkpoint's files, sorted by name; of several formats the first that is there.

    Raises FileNotFoundError when there are none.
    """
    directory = _model_directory(model)
    for pattern in WEIGHT_PATTERNS:
        found = sorted(directory.glob(pattern))
        if found:
            return found
    raise FileNotFoundError(
        f"no weights in {directory}: expected files matching {', '.join(WEIGHT_PATTERNS)}"
    )


def _model_directory(model: "ModelConfig") -> Path:
    source = Path(model.model_weights or model.model)
    if source.is_dir():
        return source
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            str(source), revision=model.revision, allow_patterns=list(WEIGHT_PATTERNS)
        )
    )
