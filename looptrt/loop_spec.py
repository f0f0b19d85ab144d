"""What a looped model is, as pure data: prelude, core times loops, coda.

Owns the description every other module reads; leaves weights and arithmetic to
`looptrt.models` and memory to `looptrt.kv_layout`. Invariant: a LoopSpec is valid or
was never constructed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from looptrt.errors import CheckpointError


class BlockKind(StrEnum):
    """Where a transformer block applies its norms (f = attention or MLP)."""

    SANDWICH = "sandwich"  # x + norm(f(norm(x)))            Ouro
    SUM_NORM = "sum_norm"  # norm(x + f(norm(x)))            Huginn
    POST_NORM = "post_norm"  # x + norm(f(x))                recurrent OLMo-2
    PRE_NORM = "pre_norm"  # x + f(norm(x))                  recurrent Llama


class RopeStyle(StrEnum):
    """Which pairs of channels a rotation mixes."""

    HALF_SPLIT = "half_split"  # (i, i + d/2)
    INTERLEAVED = "interleaved"  # (2i, 2i + 1)


class InitialState(StrEnum):
    """What a token's recurrent state is before its first loop."""

    PRELUDE = "prelude"  # the prelude's output itself (Ouro: the embedding)
    RANDOM = "random"  # truncated normal noise
    EMBEDDING = "embedding"  # the embedding, before the prelude's layers


class NoiseMode(StrEnum):
    """How the random initial state is drawn."""

    POSITION = "position"  # a function of (noise_seed, position, channel)
    SEQUENTIAL = "sequential"  # one generator per request, in the order of its chunks


class RopeScalingKind(StrEnum):
    """How the rotation per position is stretched for longer contexts."""

    LINEAR = "linear"  # every frequency divided by the factor
    LLAMA3 = "llama3"  # long wavelengths divided, short ones kept, a ramp between


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary frequencies; all but `factor` belong to `llama3`.

    Attributes:
        factor: what frequencies are divided by.
        low_freq_factor: wavelengths above original_max_position / this are divided.
        high_freq_factor: wavelengths below original_max_position / this are kept.
        original_max_position: context before the stretch.
    """

    kind: RopeScalingKind
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: pairing, base, and whether the rotation is done in float32.

    With `in_float32` the tables stay float32 and q and k are upcast, rotated and cast
    back; without it the tables are cast to the model dtype and rotation happens there.
    """

    style: RopeStyle
    base: float
    in_float32: bool
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class LoopSpec:
    """One looped language model.

    Layer passes of a token at depth k: prelude_layers + core_layers * k + coda_layers.

    Attributes:
        architecture: Hugging Face architecture name, the registry key.
        num_loops: S, the loops the model was trained to run by default.
        max_position: positions the model defines; no engine may exceed it.
        adapter: whether each loop starts with a projection of [state, prelude output].
        skip_first_adapter: the first loop starts with the prelude's output itself.
        norm_after_loop: the final norm closes every loop and feeds the next (Ouro).
        norm_before_coda: the final norm is applied once between loop and coda (Huginn).
        norm_before_head: the final norm is applied right before the head.
        qk_bias: q and k get a bias before the rotation.
        qk_norm: q and k are each normalised whole, all heads together, before the rotation.
        embedding_scale: factor on the embedding, not on the head.
        state_std: standard deviation of the parent normal of a random initial state,
            before `state_scale`; the state is cut at 3 standard deviations.
        state_scale: float32 factor on the drawn state.
        packed_projections: the checkpoint holds q, k and v as one matrix, and gate and up as
            another: the model's own products are joined. Elsewhere joining them is ours.
        exit_gate: the checkpoint has a per-token exit gate.
        tied_head: the head's weight is the embedding's.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    prelude_layers: int
    core_layers: int
    coda_layers: int
    num_loops: int
    block: BlockKind
    norm_eps: float
    rope: RopeSpec
    initial_state: InitialState
    embedding_scale: float = 1.0
    adapter: bool = False
    skip_first_adapter: bool = False
    norm_after_loop: bool = False
    norm_before_coda: bool = False
    norm_before_head: bool = False
    qk_bias: bool = False
    qk_norm: bool = False
    state_std: float = 0.0
    state_scale: float = 1.0
    packed_projections: bool = False
    exit_gate: bool = False
    tied_head: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
            "core_layers",
            "num_loops",
        ):
            _require(name, getattr(self, name), at_least=1)
        for name in ("prelude_layers", "coda_layers"):
            _require(name, getattr(self, name), at_least=0)
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_kv_heads: {self.num_heads} heads are not a multiple of "
                f"{self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim: expected an even number, got {self.head_dim}")
        if self.skip_first_adapter and not self.adapter:
            raise CheckpointError("skip_first_adapter: there is no adapter to skip")

    @property
    def qkv_size(self) -> int:
        """Rows of the packed q, k, v projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` restores an equal spec."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> LoopSpec:
        """Restore a spec written by `to_json`; an unknown or missing key raises TypeError."""
        fields = _all_fields(LoopSpec, data)
        rope = _all_fields(RopeSpec, fields.pop("rope"))
        scaling = rope.pop("scaling")
        if scaling is not None:
            scaling = _all_fields(RopeScaling, scaling)
            scaling = RopeScaling(kind=RopeScalingKind(scaling.pop("kind")), **scaling)
        return LoopSpec(
            block=BlockKind(fields.pop("block")),
            initial_state=InitialState(fields.pop("initial_state")),
            rope=RopeSpec(style=RopeStyle(rope.pop("style")), scaling=scaling, **rope),
            **fields,
        )


def _all_fields(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    """A copy of `data`, which names every field of the dataclass and nothing else."""
    names = set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if set(data) != names:
        raise TypeError(f"{kind.__name__}: keys {sorted(set(data) ^ names)} missing or unknown")
    return dict(data)


def _require(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise CheckpointError(f"{name}: expected an integer of at least {at_least}, got {value!r}")
