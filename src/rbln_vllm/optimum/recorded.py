# SPDX-License-Identifier: Apache-2.0
"""The compile configuration inside an artifact's manifest, under optimum-rbln's names."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rbln_vllm.devices import resolve_profile
from rbln_vllm.geometry import Geometry
from rbln_vllm.lora.config import RBLNLoRAConfig
from rbln_vllm.models.architectures import ARCHITECTURES, Architecture
from rbln_vllm.optimum.plan import CompilePlan, queries_of
from rbln_vllm.pooling.config import Pooling

RECORD = "rbln_config"
"""Where it stands in the manifest's ``model``."""
_TEXTS = ("cls_name", "source", "dtype", "npu", "attn_impl")
_SIZES = (
    "batch_size",
    "max_seq_len",
    "prefill_chunk_size",
    "kvcache_block_size",
    "num_devices",
)


_ROWS = {row.class_name: row for row in ARCHITECTURES.values()}


@dataclass(frozen=True)
class RecordedConfig:
    """What a model was compiled for.

    ``source`` is the model as it was named then; ``decoder_batch_sizes`` descend, as
    optimum-rbln has them. ValueError for values that cannot be.
    """

    cls_name: str
    source: str
    dtype: str
    npu: str
    attn_impl: str
    batch_size: int
    max_seq_len: int
    prefill_chunk_size: int
    kvcache_block_size: int
    decoder_batch_sizes: tuple[int, ...]
    num_devices: int = 1
    num_speculative_tokens: int = 0
    use_inputs_embeds: bool = False
    lora_config: RBLNLoRAConfig | None = None
    """The adapters that are compiled in, with nothing left open."""

    def __post_init__(self) -> None:
        if any(not isinstance(getattr(self, name), str) for name in _TEXTS):
            raise ValueError(f"{', '.join(_TEXTS)} are texts")
        sizes = (*(getattr(self, name) for name in _SIZES), *self.decoder_batch_sizes)
        if any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(f"{', '.join(_SIZES)} and decoder_batch_sizes are positive numbers")
        if type(self.num_speculative_tokens) is not int or self.num_speculative_tokens < 0:
            raise ValueError("num_speculative_tokens is a number")
        if type(self.use_inputs_embeds) is not bool:
            raise ValueError("use_inputs_embeds is true or false")
        if self.cls_name not in _ROWS:
            raise ValueError(f"there is no class {self.cls_name}")

    @property
    def architecture(self) -> Architecture:
        return _ROWS[self.cls_name]

    @property
    def runner(self) -> str:
        """What serves it, as vLLM's ``--runner`` has it."""
        return "pooling" if self.architecture.only_pools else "generate"

    @property
    def geometry(self) -> Geometry:
        """The geometry that the model was compiled for."""
        return Geometry(
            profile=resolve_profile(None if self.npu == "HOST" else self.npu),
            chunk=min(self.prefill_chunk_size, self.max_seq_len),
            block_size=self.kvcache_block_size,
            max_model_len=self.max_seq_len,
            max_num_seqs=self.batch_size,
            decode_buckets=tuple(sorted(self.decoder_batch_sizes)),
            decode_queries=queries_of(self.num_speculative_tokens),
            takes_embeds=self.use_inputs_embeds,
            pooling=Pooling.compiled(self.architecture, self.prefill_chunk_size),
        )

    @classmethod
    def of(
        cls,
        plan: CompilePlan,
        source: str,
        dtype: str,
        lora_config: RBLNLoRAConfig | None = None,
    ) -> "RecordedConfig":
        geometry = plan.geometry
        naive = geometry.attention_mode == "naive"
        return cls(
            cls_name=plan.architecture.class_name,
            source=source,
            dtype=dtype,
            npu=geometry.profile.name,
            attn_impl="eager" if naive else "flash_attn",
            batch_size=geometry.max_num_seqs,
            max_seq_len=geometry.max_model_len,
            prefill_chunk_size=plan.chunk,
            kvcache_block_size=geometry.block_size,
            decoder_batch_sizes=tuple(sorted(geometry.decode_buckets, reverse=True)),
            lora_config=lora_config,
            num_speculative_tokens=geometry.decode_queries[-1] - 1,
            use_inputs_embeds=geometry.takes_embeds,
        )

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "RecordedConfig":
        """Raises TypeError or ValueError for anything that is not one."""
        sizes = document["decoder_batch_sizes"]
        lora = document.get("lora_config")
        try:
            adapters = None if lora is None else RBLNLoRAConfig.of(lora)
        except NotImplementedError as error:
            raise ValueError(str(error)) from error
        changed = {"decoder_batch_sizes": tuple(sizes), "lora_config": adapters}
        return cls(**{**document, **changed})

    def to_json(self) -> dict[str, Any]:
        document = {**asdict(self), "decoder_batch_sizes": list(self.decoder_batch_sizes)}
        del document["lora_config"]
        if self.lora_config is not None:
            document["lora_config"] = self.lora_config.to_json()
        return document

    @property
    def kvcache_partition_len(self) -> int | None:
        """The block under its name in flash attention; None where a sequence is one block."""
        return self.kvcache_block_size if self.attn_impl == "flash_attn" else None

    def compile_command(self, directory: object) -> str:
        """The command that makes ``directory`` anew."""
        options: dict[str, object] = {
            "output": directory,
            "dtype": self.dtype,
            "batch-size": self.batch_size,
            "max-seq-len": self.max_seq_len,
            "prefill-chunk-size": self.prefill_chunk_size,
            "kvcache-block-size": self.kvcache_block_size,
            "decoder-batch-sizes": ",".join(map(str, self.decoder_batch_sizes)),
        }
        if self.architecture.encoder:
            del options["kvcache-block-size"]
        if self.architecture.only_pools:
            options["runner"] = self.runner
        if self.num_speculative_tokens:
            options["num-speculative-tokens"] = self.num_speculative_tokens
        if self.use_inputs_embeds:
            options["use-inputs-embeds"] = ""
        flags = " ".join(f"--{name} {value}".rstrip() for name, value in options.items())
        adapters = "" if self.lora_config is None else f" {self.lora_config.arguments}"
        return f"rbln-vllm compile {self.source} {flags}{adapters}"
