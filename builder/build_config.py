"""What a build is asked for, as one value.

Owns the fields and their defaults; leaves reading them to `flags`, their bounds to `limits`
and what they do to `build`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looptrt.builder.random_weights import RANDOM_SEED
from looptrt.loop_spec import NoiseMode


@dataclass(frozen=True)
class BuildConfig:
    """What a build is asked for; None leaves a choice to the model (see the flags' help).

    One of `checkpoint_dir` and `model_config` is given; with the latter, a config file alone,
    the weights are random.
    """

    checkpoint_dir: Path | None
    output_dir: Path
    max_batch_size: int = 128
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int = 8192
    tokens_per_block: int = 32
    max_loops: int | None = None
    kv_planes: str = "latest"
    noise: NoiseMode = NoiseMode.POSITION
    dtype: str | None = None
    gpt_attention_plugin: str = "auto"
    logits_dtype: str = "float32"
    backend: str = "auto"
    workers: int = 1
    model_config: Path | None = None
    model_cls_file: Path | None = None
    model_cls_name: str | None = None
    opt_batch_size: int = 8
    opt_num_tokens: int | None = None
    input_timing_cache: Path | None = None
    output_timing_cache: Path = Path("model.cache")
    profiling_verbosity: str = "layer_names_only"
    strip_plan: bool = False
    visualize_network: Path | None = None
    compile_timeout: float = 3600.0

    def recorded(self) -> dict[str, Any]:
        """The flags that shape the engine, as JSON, and where its weights are from."""
        left_out = (
            "checkpoint_dir",
            "output_dir",
            "workers",
            "model_config",
            "model_cls_file",
            "input_timing_cache",
            "output_timing_cache",
            "visualize_network",
            "compile_timeout",
        )
        names = [name for name in self.__dataclass_fields__ if name not in left_out]
        flags = {name: getattr(self, name) for name in names}
        return flags | {"weights": self.weights_source}

    @property
    def weights_source(self) -> str:
        """Where the weights come from, in words."""
        return "checkpoint" if self.model_config is None else f"random, seed {RANDOM_SEED}"
