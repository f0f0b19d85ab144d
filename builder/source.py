"""A checkpoint opened for use: its family, its spec and the recipes of its tensors.

Owns the order of the checks that build, convert and verify share; leaves each check to its
module. Invariant: what is returned has every tensor that the model needs, in shape, and no
tensor that nobody knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from looptrt.errors import CheckpointError
from looptrt.loop_spec import LoopSpec
from looptrt.models.checkpoint import CONFIG_NAME, Checkpoint, Naming
from looptrt.models.family import FLOAT32_MAX, INT32_MAX, Family, WeightRecipe
from looptrt.models.files import read_json
from looptrt.models.head import settle_head
from looptrt.models.registry import family_of
from looptrt.models.trtllm_config import check_against_spec, is_trtllm_config
from looptrt.models.trtllm_names import with_trtllm_names

_MOST_LAYERS = 4096
_MOST_ELEMENTS = 2**34  # of one tensor; the largest published ones have 2**32


@dataclass(frozen=True)
class Source:
    """A checkpoint and what its tensors mean.

    Attributes:
        opened: the files; without tensors if only a config was given.
        checkpoint: the same, under the names that the recipes use.
        family: the architecture's, with the names of its Hugging Face checkpoints.
        spec: the model; the files have decided on the head.
        recipes: {stored name: recipe} under this checkpoint's names.
    """

    opened: Checkpoint
    checkpoint: Checkpoint
    family: Family
    spec: LoopSpec
    recipes: Mapping[str, WeightRecipe]


def open_checkpoint(directory: Path, family: Family | None = None) -> Source:
    """Open and check a checkpoint directory.

    Args:
        directory: Hugging Face's or TensorRT-LLM's layout.
        family: the architecture's family, None to look it up.

    Raises:
        CheckpointError: the checkpoint cannot be used; names file, tensor and key.
    """
    _check_known(directory / CONFIG_NAME, family)
    source = _described(Checkpoint.open(directory), family)
    named = with_names(source.family, source.opened.naming)
    checkpoint, spec = settle_head(source.opened, named, source.spec)
    _check_agreement(checkpoint, spec)
    recipes = named.weight_map(spec)
    checkpoint.check(source_shapes(recipes), named.ignored)
    return replace(source, checkpoint=checkpoint, spec=spec, recipes=recipes)


def open_config(path: Path, family: Family | None = None) -> Source:
    """Read a config alone; its word decides about the head.

    Raises:
        CheckpointError: the config cannot be used.
    """
    _check_known(path, family)
    source = _described(Checkpoint.describe(path), family)
    _check_agreement(source.opened, source.spec)
    return source


def source_shapes(recipes: Mapping[str, WeightRecipe]) -> dict[str, tuple[int, ...]]:
    """{checkpoint name: shape} of every tensor that the recipes read."""
    return {
        name: shape
        for recipe in recipes.values()
        for name, shape in zip(recipe.sources, recipe.hf_shapes, strict=True)
    }


def with_names(family: Family, naming: Naming) -> Family:
    """A family that reads checkpoints under these names."""
    return with_trtllm_names(family) if naming is Naming.TRTLLM else family


def _described(opened: Checkpoint, given: Family | None) -> Source:
    family = _family(opened, given)
    spec = _spec(opened, family)
    _check_sizes(spec, opened)
    recipes = with_names(family, opened.naming).weight_map(spec)
    for name, shape in source_shapes(recipes).items():
        if math.prod(shape) > _MOST_ELEMENTS:
            raise CheckpointError(
                f"{opened.config_path}: tensor {name!r}: expected at most {_MOST_ELEMENTS} "
                f"elements, the config gives it shape {list(shape)}"
            )
    return Source(opened, opened, family, spec, recipes)


def _spec(opened: Checkpoint, family: Family) -> LoopSpec:
    where = str(opened.config_path)
    if family.parse_with_names is None or not opened.tensors:
        return family.parse_config(opened.config, where)
    shapes = {name: entry.shape for name, entry in opened.tensors.items()}
    return family.parse_with_names(opened.config, where, shapes)


def _check_sizes(spec: LoopSpec, opened: Checkpoint) -> None:
    """Refuse a spec that no machine could hold, before anything is made from it.

    Raises:
        CheckpointError: a number is beyond int32 or float32, or there are more layers than
            tensors.
    """
    where = opened.config_path
    values = {**vars(spec), "rope.base": spec.rope.base, **_state_range(spec)}
    for name, value in values.items():
        if isinstance(value, int) and value > INT32_MAX:
            raise CheckpointError(f"{where}: {name}: expected at most {INT32_MAX}")
        if isinstance(value, float) and not abs(value) <= FLOAT32_MAX:
            raise CheckpointError(f"{where}: {name}: expected a number that float32 holds")
    layers = spec.prelude_layers + spec.core_layers + spec.coda_layers
    most = min(len(opened.tensors) or _MOST_LAYERS, _MOST_LAYERS)
    if layers > most:
        there = f"; there are {len(opened.tensors)} tensors" if opened.tensors else ""
        raise CheckpointError(f"{where}: expected at most {most} layers, found {layers}{there}")


def _state_range(spec: LoopSpec) -> dict[str, float]:
    """The largest value of a random initial state, which is cut at 3 standard deviations."""
    return {"initial state": 3.0 * spec.state_std * spec.state_scale}


def _check_agreement(checkpoint: Checkpoint, spec: LoopSpec) -> None:
    if checkpoint.naming is Naming.TRTLLM:
        check_against_spec(read_json(checkpoint.config_path), spec, checkpoint.config_path)


def _check_known(path: Path, given: Family | None) -> None:
    """Name an unknown architecture before the keys are missed that only ours have."""
    config = read_json(path) if path.is_file() else {}
    if given is None and is_trtllm_config(config) and isinstance(config["architecture"], str):
        _look_up(config["architecture"], path)


def _family(checkpoint: Checkpoint, given: Family | None) -> Family:
    if given is None:
        return _look_up(checkpoint.architecture, checkpoint.config_path)
    if given.architecture != checkpoint.architecture:
        raise CheckpointError(
            f"{checkpoint.config_path}: architectures: expected {given.architecture!r}, the "
            f"family that was given, found {checkpoint.architecture!r}"
        )
    return given


def _look_up(architecture: str, path: Path) -> Family:
    try:
        return family_of(architecture)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
