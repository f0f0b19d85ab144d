"""What a family of looped models must say of itself.

Owns the family record, the recipes from checkpoint tensors to fused ones and the reading of
config values; leaves files to `checkpoint` and arithmetic to `blocks`. Invariant: a family
names every tensor of its checkpoints, with shapes, before any of them is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from looptrt.errors import CheckpointError
from looptrt.loop_spec import LoopSpec
from looptrt.models import blocks
from looptrt.models.files import shown

Config = Mapping[str, Any]
Shape = tuple[int, ...]

INT32_MAX = 2**31 - 1
FLOAT32_MAX = 2**128 - 2**104  # as an integer, so that no comparison overflows
_FLOAT32_TINY = 2.0**-126


@dataclass(frozen=True)
class WeightRecipe:
    """How one stored tensor is made of checkpoint tensors, joined along their first dimension.

    Attributes:
        sources: checkpoint names, in order.
        hf_shapes: their shapes, in the same order.
        shape: shape of the stored tensor.
    """

    sources: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    shape: Shape

    @staticmethod
    def copy(source: str, *shape: int) -> WeightRecipe:
        """One tensor as it is."""
        return WeightRecipe((source,), (shape,), shape)

    @staticmethod
    def concat(sources: Mapping[str, Shape]) -> WeightRecipe:
        """Matrices with equal columns, stacked by rows."""
        shapes = tuple(sources.values())
        rows = sum(shape[0] for shape in shapes)
        return WeightRecipe(tuple(sources), shapes, (rows, *shapes[0][1:]))

    @staticmethod
    def reshape(source: str, hf_shape: Shape, shape: Shape) -> WeightRecipe:
        """One tensor, same elements in the same order, another shape."""
        return WeightRecipe((source,), (hf_shape,), shape)


def fuse(recipe: WeightRecipe, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make a stored tensor of the sources' tensors, of the recipe's shapes and one dtype."""
    return torch.cat(tuple(parts)).reshape(recipe.shape)


@dataclass(frozen=True)
class Family:
    """One architecture: how its config and its tensor names become a LoopSpec and ours.

    A family only translates. The model is made of the LoopSpec by the shared blocks, so an
    engine needs neither the family nor the module or file that it came from.

    Attributes:
        architecture: the name in a config's `architectures`.
        parse_config: (config, where) to spec; raises CheckpointError naming `where`, key,
            expected and found. `tied_head` is the config's word; the files decide.
        weight_map: {stored name: recipe} of every tensor of the spec's checkpoint; a tied
            head has none of its own.
        embedding: checkpoint name of the embedding, of which a tied head is the other user.
        head: checkpoint name of the head.
        ignored: fnmatch patterns of checkpoint tensors that may be there and are not read.
        parse_with_names: for an architecture whose config alone may not tell the model:
            (config, where, {name: shape} of the tensors that are there) to spec; asked instead
            of `parse_config` where there are tensors.
        end_tokens: tokens that end an answer wherever the tokenizer has them, beside those
            that the checkpoint's configs name.
        chat_template: Jinja source for checkpoints that bring none; built into the engine.
        build: makes the model; the same for all.
    """

    architecture: str
    parse_config: Callable[[Config, str], LoopSpec]
    weight_map: Callable[[LoopSpec], dict[str, WeightRecipe]]
    embedding: str
    head: str
    ignored: tuple[str, ...] = ()
    parse_with_names: Callable[[Config, str, Mapping[str, Shape]], LoopSpec] | None = None
    end_tokens: tuple[str, ...] = ()
    chat_template: str | None = None
    build: ClassVar = staticmethod(blocks.build)


@dataclass(frozen=True)
class ConfigReader:
    """Typed values of a config; null counts as absent, aliases must agree.

    Attributes:
        config: the parsed file.
        where: the file's name, for errors.
    """

    config: Config
    where: str

    def integer(self, *names: str, default: int | None = None) -> int:
        """A positive int32 under any of the names."""
        name, value = self._find(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "an integer of at least 1", value)
        if value > INT32_MAX:
            raise self.error(name, f"an integer of at most {INT32_MAX}", value)
        return value

    def number(self, *names: str, default: float | None = None, may_be_zero: bool = False) -> float:
        """A positive (or zero) number of float32 under any of the names."""
        name, value = self._find(names, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        expected = "a number of at least 0" if may_be_zero else "a positive number"
        if not is_number or not value >= 0 or (value == 0 and not may_be_zero):
            raise self.error(name, expected, value)
        if not (0 if may_be_zero else _FLOAT32_TINY) <= value <= FLOAT32_MAX:
            raise self.error(name, f"{expected} that float32 holds", value)
        return float(value)

    def word(self, *names: str, default: str | None = None) -> str:
        """A string under any of the names."""
        name, value = self._find(names, default)
        if not isinstance(value, str):
            raise self.error(name, "a string", value)
        return value

    def flag(self, *names: str, default: bool | None = None) -> bool:
        """A boolean under any of the names."""
        name, value = self._find(names, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false", value)
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A nested object, empty if absent."""
        value = self.config.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(name, "an object", value)
        return value

    def expect(self, name: str, *allowed: object) -> None:
        """Refuse a key whose value, if it has one, is none of those allowed."""
        value = self.config.get(name)
        if value is not None and value not in allowed:
            raise self.error(name, " or ".join(map(repr, allowed)) or "null or no key", value)

    def error(self, name: str, expected: str, found: object) -> CheckpointError:
        """Say what is wrong with a key."""
        return CheckpointError(f"{self.where}: {name}: expected {expected}, found {shown(found)}")

    def spec(self, **fields: Any) -> LoopSpec:  # noqa: ANN401 - LoopSpec's own fields
        """Make the spec; what it refuses is the file's fault."""
        try:
            return LoopSpec(**fields)
        except CheckpointError as error:
            raise CheckpointError(f"{self.where}: {error}") from None

    def _find(self, names: tuple[str, ...], default: object) -> tuple[str, Any]:
        found = {name: self.config[name] for name in names if self.config.get(name) is not None}
        if not found:
            if default is None:
                raise self.error(" or ".join(names), "a value", None)
            return names[0], default
        (name, value), *others = found.items()
        for other, other_value in others:
            if other_value != value:
                raise self.error(other, f"{shown(value)} as in {name}", other_value)
        return name, value
