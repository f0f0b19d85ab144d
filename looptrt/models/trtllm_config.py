"""config.json of a TensorRT-LLM checkpoint directory: recognised, checked, written.

Owns TensorRT-LLM's keys and what they must say for a looped model; leaves the model itself to
the family's own config, which such a file carries whole under `hf_config`. Invariant: where
TensorRT-LLM's keys and `hf_config` both say something, they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looptrt.errors import CheckpointError
from looptrt.loop_spec import LoopSpec, RopeStyle
from looptrt.models.files import shown

RANK_NAME = "rank0.safetensors"
HF_CONFIG = "hf_config"

_DTYPES = ("dtype", "torch_dtype")
_ROPE_TYPES = {RopeStyle.HALF_SPLIT: "rope_gpt_neox", RopeStyle.INTERLEAVED: "rope_gptj"}
_DEGREES = ("world_size", "tp_size", "pp_size", "cp_size")


def is_trtllm_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is TensorRT-LLM's: it names one `architecture`."""
    return "architecture" in config and "architectures" not in config


def family_config(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The family's own config out of TensorRT-LLM's.

    Args:
        config: the parsed file.
        path: where it lies, for errors.

    Raises:
        CheckpointError: the weights are split over ranks or quantised, `hf_config` is missing,
            or it disagrees with the keys around it.
    """
    _check_single_rank(_object(config, "mapping", path), path)
    _check_not_quantised(_object(config, "quantization", path), path)
    inner = config.get(HF_CONFIG)
    if not isinstance(inner, dict):
        raise CheckpointError(
            f"{path}: {HF_CONFIG}: expected the model's own config.json as an object, found "
            f"{shown(inner)}; `looptrt convert` writes such directories"
        )
    _check_agreement(f"{path}: architecture", config["architecture"], inner.get("architectures"))
    for key in _DTYPES:
        if inner.get(key) is not None and config.get("dtype") is not None:
            _check_agreement(f"{path}: dtype", config["dtype"], [inner[key]])
    return inner


def check_ranks(directory: Path) -> None:
    """Refuse a directory that holds the weights of further ranks.

    Raises:
        CheckpointError: a rank other than 0 is there; names it.
    """
    others = sorted(path.name for path in directory.glob("rank[1-9]*.safetensors"))
    if others:
        raise CheckpointError(
            f"{directory / others[0]}: found {', '.join(others)} beside {RANK_NAME}: weights split "
            "over ranks are not supported; convert with tp_size 1 and pp_size 1"
        )


def check_against_spec(config: Mapping[str, Any], spec: LoopSpec, path: Path) -> None:
    """Check TensorRT-LLM's keys, as far as they are there, against the model they describe.

    Raises:
        CheckpointError: a key contradicts `hf_config`; names both values.
    """
    for key, value in _described(spec).items():
        if config.get(key) is not None and config[key] != value:
            raise CheckpointError(
                f"{path}: {key}: expected {value!r} as {HF_CONFIG} says, found {shown(config[key])}"
            )


def trtllm_config(hf_config: Mapping[str, Any], spec: LoopSpec, dtype: str) -> dict[str, Any]:
    """config.json of a TensorRT-LLM checkpoint.

    Args:
        hf_config: the family's own config, carried along whole.
        spec: what it describes.
        dtype: the weights' dtype.
    """
    return {
        "architecture": hf_config["architectures"][0],
        "dtype": dtype,
        **_described(spec),
        "hidden_act": "silu",
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        HF_CONFIG: dict(hf_config),
    }


def _described(spec: LoopSpec) -> dict[str, Any]:
    """TensorRT-LLM's keys that a spec decides."""
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.prelude_layers + spec.core_layers + spec.coda_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_size": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "norm_epsilon": spec.norm_eps,
        "position_embedding_type": _ROPE_TYPES[spec.rope.style],
        "rotary_base": spec.rope.base,
    }


def _object(config: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{path}: {key}: expected an object, found {shown(value)}")
    return value or {}


def _check_single_rank(mapping: Mapping[str, Any], path: Path) -> None:
    for key in _DEGREES:
        if mapping.get(key, 1) != 1:
            raise CheckpointError(
                f"{path}: mapping.{key}: expected 1, found {shown(mapping[key])}: weights split "
                "over ranks are not supported; convert with tp_size 1 and pp_size 1"
            )


def _check_not_quantised(quantization: Mapping[str, Any], path: Path) -> None:
    for key in ("quant_algo", "kv_cache_quant_algo"):
        if quantization.get(key) is not None:
            raise CheckpointError(
                f"{path}: quantization.{key}: expected null, found {shown(quantization[key])}; "
                "quantised checkpoints are not supported"
            )


def _check_agreement(where: str, outer: object, inner: object) -> None:
    names = [_word(name) for name in inner] if isinstance(inner, list) else []
    if [outer] != names:
        raise CheckpointError(
            f"{where}: expected what {HF_CONFIG} says, {shown(names)}, found {shown(outer)}"
        )


def _word(value: object) -> object:
    return value.removeprefix("torch.") if isinstance(value, str) else value
