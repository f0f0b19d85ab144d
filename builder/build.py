"""A build, from a checkpoint to an engine directory.

Owns the order of the steps and every decision that the flags leave open; leaves reading
checkpoints to `looptrt.models`, the graphs to `builder.export` and the directory's
atomicity to `builder.engine_dir`. Invariant: all that can be refused is refused by
`plan_build`, before a byte is written; only unreadable or non-finite weights come later.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from looptrt import __version__
from looptrt.builder.build_config import BuildConfig
from looptrt.builder.casts import TORCH_DTYPES, CastLog
from looptrt.builder.compile import CompilePlan, compile_phases, plan_compile
from looptrt.builder.engine_dir import (
    atomic_directory,
    check_beside_checkpoint,
    check_path,
    check_target,
)
from looptrt.builder.export import export_phases
from looptrt.builder.limits import build_limits, check_counts, check_memory
from looptrt.builder.random_weights import RANDOM_SEED, random_weight
from looptrt.builder.source import Source, open_checkpoint, open_config
from looptrt.builder.tokens import token_ids, tokenizer_files
from looptrt.builder.weights import WeightsLayout, fingerprint, write_weights
from looptrt.errors import BuildError
from looptrt.kv_layout import PlaneLayout
from looptrt.loop_spec import InitialState, LoopSpec, NoiseMode
from looptrt.manifest import (
    BACKENDS,
    CONFIG_NAME,
    TENSORRT_BACKENDS,
    WEIGHTS_NAME,
    BuildLimits,
    Manifest,
    PhaseGraph,
    TokenIds,
    sha256_of,
)
from looptrt.models import registry
from looptrt.models.blocks import LoopedModel, rope_tables
from looptrt.models.checkpoint import Checkpoint
from looptrt.models.family import WeightRecipe

_TOOLS = ("torch", "onnx", "onnx-ir", "safetensors")
_DEFAULT_BACKEND = "pytorch"
# Fields that say something about TensorRT engines only.
_ENGINE_FIELDS = (
    "opt_batch_size",
    "opt_num_tokens",
    "input_timing_cache",
    "output_timing_cache",
    "profiling_verbosity",
    "strip_plan",
    "visualize_network",
    "compile_timeout",
)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildPlan:
    """A build with every choice made and every check of the headers passed."""

    config: BuildConfig
    checkpoint: Checkpoint
    spec: LoopSpec
    layout: PlaneLayout
    limits: BuildLimits
    tokens: TokenIds
    dtype: str
    recipes: Mapping[str, WeightRecipe]
    model: LoopedModel
    weights: WeightsLayout
    text_files: Mapping[str, Path | str]
    compile: CompilePlan | None

    @property
    def backend(self) -> str:
        """The backend that the engine is built for."""
        return self.config.backend if self.compile is not None else _DEFAULT_BACKEND

    @property
    def inputs(self) -> tuple[Path, ...]:
        """Every file that is read for the engine."""
        checkpoint, config = self.checkpoint, self.config
        texts = [file for file in self.text_files.values() if isinstance(file, Path)]
        return (
            checkpoint.config_path,
            checkpoint.listing,
            *{entry.file for entry in checkpoint.tensors.values()},
            *texts,
            *filter(None, (config.model_config, config.model_cls_file, config.input_timing_cache)),
        )

    def tables(self) -> dict[str, torch.Tensor]:
        """The rope tables: what the model stores and no checkpoint holds."""
        cos, sin = rope_tables(self.spec, self.limits.max_seq_len, TORCH_DTYPES[self.dtype])
        values = {"cos": cos, "sin": sin}
        names = self.weights.places.keys() - self.recipes.keys()
        return {name: values[name.rpartition(".")[2]] for name in names}

    def describe(self) -> str:
        """The plan as text, one fact a line."""
        spec, layout, limits = self.spec, self.layout, self.limits
        facts = {
            "architecture": spec.architecture,
            "layers": f"{spec.prelude_layers} prelude, {spec.core_layers} core, "
            f"{spec.coda_layers} coda",
            "loops": f"{spec.num_loops} trained, up to {layout.max_loops} in this engine",
            "dtype": f"{self.dtype}, logits {self.config.logits_dtype}",
            "weights": f"{len(self.recipes)} tensors, {self.weights.num_bytes} bytes "
            f"({self.config.weights_source})",
            "KV planes": f"{layout.num_planes} ({layout.strategy.name}), "
            f"pages of {layout.page_size} tokens, units of {layout.unit_bytes} bytes",
            "KV per token": f"{layout.bytes_per_token(spec.num_loops)} bytes "
            f"at {spec.num_loops} loops",
            "limits": f"{limits.max_batch_size} requests, prompt {limits.max_input_len}, "
            f"sequence {limits.max_seq_len}, {limits.max_num_tokens} tokens a step",
            "noise": self.config.noise.value,
            "end tokens": f"{list(self.tokens.eos)} ({self.tokens.source})",
            "backend": self.backend,
            **({} if self.compile is None else self.compile.describe()),
            "output": str(self.config.output_dir),
        }
        width = max(map(len, facts))
        return "".join(f"{name:<{width}}  {value}\n" for name, value in facts.items())


def plan_build(config: BuildConfig) -> BuildPlan:
    """Make every choice of a build and check all that can be checked without tensor data.

    Raises:
        BuildError: a flag cannot be served; names it.
        CheckpointError: the checkpoint cannot be used; names file, tensor and key.
    """
    _check_flags(config)
    _check_paths(config)
    source = _source(config)
    checkpoint, spec = source.checkpoint, source.spec
    dtype = _dtype(config, checkpoint)
    if config.gpt_attention_plugin not in ("auto", dtype):
        raise BuildError(
            f"--gpt_attention_plugin {config.gpt_attention_plugin}: attention runs in the "
            f"engine's dtype, {dtype}; say auto, or choose another --dtype"
        )
    _check_noise(config.noise, spec)
    layout = PlaneLayout.of(
        spec,
        page_size=config.tokens_per_block,
        max_loops=_max_loops(config, spec),
        dtype=dtype,
        kv_planes=config.kv_planes,
    )
    limits = build_limits(config, spec)
    check_memory(spec, layout, limits)
    model = source.family.build(
        spec,
        layout,
        max_positions=limits.max_seq_len,
        dtype=TORCH_DTYPES[dtype],
        noise_mode=config.noise,
        logits_dtype=TORCH_DTYPES[config.logits_dtype],
        device="meta",
    )
    plan = BuildPlan(
        config=config,
        checkpoint=checkpoint,
        spec=spec,
        layout=layout,
        limits=limits,
        tokens=token_ids(checkpoint, spec.vocab_size, source.family.end_tokens),
        dtype=dtype,
        recipes=source.recipes,
        model=model,
        weights=WeightsLayout.of(model),
        text_files=tokenizer_files(checkpoint.directory, source.family),
        compile=plan_compile(config, limits, layout)
        if config.backend in TENSORRT_BACKENDS
        else None,
    )
    check_target(config.output_dir, inputs=plan.inputs)
    return plan


def build(config: BuildConfig) -> Manifest:
    """Build an engine directory; one of ours that is at `output_dir` is replaced.

    Raises:
        BuildError, CheckpointError: see `plan_build`; also a tensor that is not finite or
            does not fit the dtype. The output directory is then as it was.
    """
    plan = plan_build(config)
    if config.model_config is not None:
        _logger.warning(
            "%s alone: the weights are random (seed %d); the engine is for measuring, not for "
            "answers",
            config.model_config,
            RANDOM_SEED,
        )
    if config.backend == "auto":
        _logger.info("--backend auto: %s, which runs everywhere", _DEFAULT_BACKEND)
    with atomic_directory(config.output_dir, inputs=plan.inputs) as draft:
        manifest = _write(plan, draft)
    _logger.info("wrote %s", config.output_dir)
    return manifest


def make_weights(plan: BuildPlan, path: Path) -> dict[str, str]:
    """Write a plan's weights; casts are logged.

    Returns:
        {stored name: SHA-256 of its bytes}.

    Raises:
        CheckpointError: a tensor has a NaN or infinity, or does not fit the dtype.
    """
    casts, tables = CastLog(), plan.tables()

    def make(name: str) -> torch.Tensor:
        stand_in = plan.weights.tensors[name]
        if name in tables:
            return tables[name]
        if plan.config.model_config is not None:
            return random_weight(name, stand_in)
        return casts.fused(plan.checkpoint, plan.recipes[name], stand_in.dtype)

    digests = write_weights(make, plan.weights, path, plan.config.workers)
    casts.report()
    return digests


def _write(plan: BuildPlan, draft: Path) -> Manifest:
    digests = make_weights(plan, draft / WEIGHTS_NAME)
    phases = export_phases(plan.model, plan.layout, plan.weights, draft)
    if plan.compile is not None:
        phases = compile_phases(plan.compile, phases, draft)
    for name, file in plan.text_files.items():
        if isinstance(file, Path):
            shutil.copyfile(file, draft / name)
        else:
            (draft / name).write_text(file, encoding="utf-8")
    model_id = fingerprint(plan.spec, plan.weights, digests, plan.recipes)
    manifest = _manifest(plan, draft, phases, model_id)
    text = json.dumps(manifest.to_json(), indent=2) + "\n"
    (draft / CONFIG_NAME).write_text(text, encoding="utf-8")
    return manifest


def _source(config: BuildConfig) -> Source:
    family = None
    if config.model_cls_file is not None:
        if config.model_cls_name is None:
            raise BuildError("--model_cls_file: name the family in it with --model_cls_name")
        family = registry.load_family_file(config.model_cls_file, config.model_cls_name)
    elif config.model_cls_name is not None:
        raise BuildError("--model_cls_name: say which file has it with --model_cls_file")
    if config.checkpoint_dir is None:
        if config.model_config is None:
            raise BuildError("--checkpoint_dir or --model_config: one of them is required")
        return open_config(config.model_config, family)
    if config.model_config is not None:
        raise BuildError(
            "--model_config: the checkpoint's own config.json describes it; leave out one of "
            "--checkpoint_dir and --model_config"
        )
    return open_checkpoint(config.checkpoint_dir, family)


def _manifest(
    plan: BuildPlan, draft: Path, phases: dict[str, PhaseGraph], fingerprint: str
) -> Manifest:
    return Manifest(
        version=__version__,
        backend=plan.backend,
        dtype=plan.dtype,
        logits_dtype=plan.config.logits_dtype,
        spec=plan.spec,
        layout=plan.layout,
        limits=plan.limits,
        noise_mode=plan.config.noise,
        tokens=plan.tokens,
        phases=phases,
        fingerprint=fingerprint,
        files={path.name: (sha256_of(path), path.stat().st_size) for path in draft.iterdir()},
        build_flags=plan.config.recorded(),
        tools={"python": platform.python_version(), **{name: version(name) for name in _TOOLS}},
    )


def _check_flags(config: BuildConfig) -> None:
    if config.backend not in ("auto", *BACKENDS):
        raise BuildError(f"--backend {config.backend}: expected auto, {', '.join(BACKENDS)}")
    check_counts(config)
    if config.backend not in TENSORRT_BACKENDS:
        _check_no_engine(config)
    for name in ("dtype", "logits_dtype"):
        value = getattr(config, name)
        if value is not None and value not in TORCH_DTYPES:
            raise BuildError(f"--{name} {value}: expected {' or '.join(TORCH_DTYPES)}")


def _check_no_engine(config: BuildConfig) -> None:
    """Refuse what is said about TensorRT engines where none is built."""
    for field in dataclasses.fields(config):
        if field.name in _ENGINE_FIELDS and getattr(config, field.name) != field.default:
            raise BuildError(
                f"--{field.name}: belongs to a TensorRT engine; say --backend "
                f"{' or '.join(TENSORRT_BACKENDS)}, this build's is {_DEFAULT_BACKEND}"
            )


def _check_paths(config: BuildConfig) -> None:
    check_target(config.output_dir)
    written = ("output_timing_cache", "visualize_network")
    for flag in (
        "checkpoint_dir",
        "model_config",
        "model_cls_file",
        "input_timing_cache",
        *written,
    ):
        path = getattr(config, flag)
        if path is not None:
            check_path(path, f"--{flag}")
    if config.checkpoint_dir is not None:
        check_beside_checkpoint(config.output_dir, config.checkpoint_dir)


def _dtype(config: BuildConfig, checkpoint: Checkpoint) -> str:
    dtype = config.dtype or checkpoint.declared_dtype
    if dtype not in TORCH_DTYPES:
        raise BuildError(
            f"{checkpoint.config_path}: dtype {dtype}: looped states leave its range or it is "
            f"unknown; choose --dtype {' or '.join(TORCH_DTYPES)}"
        )
    return dtype


def _check_noise(noise: NoiseMode, spec: LoopSpec) -> None:
    if noise is NoiseMode.SEQUENTIAL and spec.initial_state is not InitialState.RANDOM:
        raise BuildError(f"--noise {noise}: {spec.architecture} has no random initial state")


def _max_loops(config: BuildConfig, spec: LoopSpec) -> int:
    if config.max_loops is None:
        return spec.num_loops
    if config.max_loops > spec.num_loops:
        _logger.warning(
            "--max_loops %d: more than the %d loops that the model runs by default",
            config.max_loops,
            spec.num_loops,
        )
    return config.max_loops
