"""Shared blocks of looped models and the three phases made of them.

Owns the arithmetic of every family, read off a LoopSpec; leaves checkpoint names to the
families and special operations to `looptrt.plugins.ops`. Invariant: a phase is a pure function
of its declared inputs and the KV memory, and never inspects a tensor's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looptrt.errors import BuildError
from looptrt.kv_layout import PlaneLayout
from looptrt.loop_spec import (
    BlockKind,
    InitialState,
    LoopSpec,
    NoiseMode,
    RopeScaling,
    RopeScalingKind,
    RopeStyle,
)
from looptrt.plugins.ops import Operators
from looptrt.plugins.products import JoinedProduct, Products

EMBEDDING = "prelude.embedding.weight"
HEAD = "coda.head.weight"

Device: TypeAlias = torch.device | str
Join: TypeAlias = Callable[
    [Operators, Tensor, Tensor, Tensor | None, Tensor | None, float], tuple[Tensor, Tensor]
]


class KVInputs(NamedTuple):
    """Where the rows of a phase store and find KV.

    Attributes:
        positions: [R] int32 token positions.
        cu_seqlens: [N + 1] int32 first row of each sequence, then R.
        seq_slots: [N] int32 slots of the sequences in the table.
        block_table: [max_slots, num_rows, max_pages] int32 unit ids.
        kv_pool: [2] int64 address of the pool and number of units.
        plane: [1] int32 plane of this loop, 0 in the prelude and coda.
    """

    positions: Tensor
    cu_seqlens: Tensor
    seq_slots: Tensor
    block_table: Tensor
    kv_pool: Tensor
    plane: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> KVInputs:
        """Pick the KV inputs out of a phase's inputs."""
        return cls(*(tensors[name] for name in cls._fields))


class Weight(nn.Module):
    """One tensor named `weight`, uninitialised until a checkpoint fills it."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: Device) -> None:
        super().__init__()
        self.weight = _parameter(*shape, dtype=dtype, device=device)


class Rope(nn.Module):
    """Cosine and sine tables, [max_positions, head_dim / 2], one module for all phases."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, spec: LoopSpec, max_positions: int, *, dtype: torch.dtype, device: Device
    ) -> None:
        super().__init__()
        cos, sin = rope_tables(spec, max_positions, dtype)
        self.register_buffer("cos", cos.to(device))
        self.register_buffer("sin", sin.to(device))


def inverse_frequencies(spec: LoopSpec) -> Tensor:
    """Rotation per position of each channel pair, [head_dim / 2] float32.

    Source: the references' float32 arithmetic.
    """
    channels = torch.arange(0, spec.head_dim, 2).float()
    frequencies = 1.0 / (spec.rope.base ** (channels / spec.head_dim))
    return _stretched(frequencies, spec.rope.scaling)


def _stretched(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    if scaling is None:
        return frequencies
    if scaling.kind is RopeScalingKind.LINEAR:
        return frequencies / scaling.factor
    # Llama 3: periods that fit the original context high_freq_factor times keep their frequency,
    # those that fit less than low_freq_factor times are stretched, a ramp lies between.
    context, low, high = (
        scaling.original_max_position,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    wavelengths = 2 * math.pi / frequencies
    share = (context / wavelengths - low) / (high - low)
    ramp = (1 - share) * frequencies / scaling.factor + share * frequencies
    stretched = torch.where(wavelengths > context / low, frequencies / scaling.factor, ramp)
    return torch.where(wavelengths < context / high, frequencies, stretched)


def rope_tables(spec: LoopSpec, max_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, computed in float32 on the CPU.

    Returns:
        Two [max_positions, head_dim / 2] tables: float32, or cast to `dtype` where the
        family rotates in its model dtype.
    """
    angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies(spec))
    kept = torch.float32 if spec.rope.in_float32 else dtype
    return angles.cos().to(kept), angles.sin().to(kept)


class Layer(nn.Module):
    """Weights of one transformer layer and its two sublayers.

    norm_1 and norm_3 open the attention and the MLP, norm_2 and norm_4 close them; a block
    kind without opening or closing norms has None there.

    Args:
        spec: the model.
        layout: the KV geometry.
        place: (table row, slot) of the layer's KV.
        dtype: dtype of weights and activations.
        device: where the weights live.

    Attributes:
        products: how its matrix products are computed; see `LoopedModel.use_products`.
        operators: what it calls by name; see `LoopedModel.use_operators`.
        joined: those of them that hold several of the checkpoint's matrices.
    """

    products = Products()
    operators = Operators()

    def __init__(
        self,
        spec: LoopSpec,
        layout: PlaneLayout,
        place: tuple[int, int],
        *,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        super().__init__()
        hidden, wide = spec.hidden_size, spec.intermediate_size
        query_size, key_size = (n * spec.head_dim for n in (spec.num_heads, spec.num_kv_heads))

        def weight(*shape: int) -> Weight:
            return Weight(*shape, dtype=dtype, device=device)

        opens, closes = (spec.block not in kinds for kinds in (_UNOPENED, _UNCLOSED))
        self.norm_1 = weight(hidden) if opens else None
        self.qkv = weight(spec.qkv_size, hidden)
        if spec.qk_norm:
            self.q_norm = weight(query_size)
            self.k_norm = weight(key_size)
        if spec.qk_bias:
            self.qk_bias = _parameter(query_size + key_size, dtype=dtype, device=device)
        self.o = weight(hidden, query_size)
        self.norm_2 = weight(hidden) if closes else None
        self.norm_3 = weight(hidden) if opens else None
        self.gate_up = weight(2 * wide, hidden)
        self.down = weight(hidden, wide)
        self.norm_4 = weight(hidden) if closes else None
        self._qk_norm_eps = spec.norm_eps if spec.qk_norm else None
        self._has_bias = spec.qk_bias
        self._qkv = JoinedProduct(hidden, (query_size, key_size, key_size))
        self._gate_up = JoinedProduct(hidden, (wide, wide))
        self.joined = () if spec.packed_projections else (self._qkv, self._gate_up)
        self._heads = {
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
        }
        self._interleaved = int(spec.rope.style is RopeStyle.INTERLEAVED)
        self._kv_place = {
            "page_size": layout.page_size,
            "unit_slots": layout.unit_slots,
            "row": place[0],
            "slot": place[1],
            "scale": spec.head_dim**-0.5,
        }

    def attend(self, y: Tensor, kv: KVInputs, rope: Rope) -> Tensor:
        """Attention sublayer of its input rows, [R, H] to [R, H]."""
        operators = self.operators
        qkv = self.products.joined(y, self.qkv.weight, self._qkv)
        if self._qk_norm_eps is not None:
            norms = self.q_norm.weight, self.k_norm.weight
            qkv = operators.fenced_qk_norm(qkv, *norms, **self._heads, eps=self._qk_norm_eps)
        turn = (kv.positions, rope.cos, rope.sin)
        if self._has_bias:
            qkv = operators.fenced_bias_rope(
                qkv, self.qk_bias, *turn, **self._heads, interleaved=self._interleaved
            )
        else:
            qkv = operators.fenced_rope(qkv, *turn, **self._heads, interleaved=self._interleaved)
        attended = operators.packed_plane_attention(qkv, *kv, **self._heads, **self._kv_place)
        return self.products.linear(attended, self.o.weight)

    def mlp(self, y: Tensor) -> Tensor:
        """MLP sublayer of its input rows, [R, H] to [R, H]."""
        gate_up = self.products.joined(y, self.gate_up.weight, self._gate_up)
        return self.products.linear(self.operators.fenced_silu_mul(gate_up), self.down.weight)


def _open(operators: Operators, h: Tensor, opening: Tensor | None, eps: float) -> Tensor:
    """A sublayer's input: the stream after its opening norm, or itself."""
    if opening is None:
        return h
    opened: Tensor = operators.fenced_rms_norm(h, opening, eps=eps)
    return opened


def _join_sandwich(
    operators: Operators,
    x: Tensor,
    residual: Tensor,
    closing: Tensor | None,
    opening: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    if opening is None:
        h = residual + operators.fenced_rms_norm(x, closing, eps=eps)
        return h, h
    h, y = operators.fenced_rms_norm_add_rms_norm(x, residual, closing, opening, eps=eps)
    return h, y


def _join_sum_norm(
    operators: Operators,
    x: Tensor,
    residual: Tensor,
    closing: Tensor | None,
    opening: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    if opening is None:
        h = operators.fenced_add_rms_norm(x, residual, closing, eps=eps)
        return h, h
    h, y = operators.fenced_add_rms_norm_rms_norm(x, residual, closing, opening, eps=eps)
    return h, y


def _join_pre_norm(
    operators: Operators,
    x: Tensor,
    residual: Tensor,
    _closing: Tensor | None,
    opening: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    h = residual + x
    return h, _open(operators, h, opening, eps)


# How a sublayer's output x joins the stream: (operators, x, residual, closing norm, next
# sublayer's opening norm or None, eps) to the new stream h and the next sublayer's input y.
JOINS: Mapping[BlockKind, Join] = {
    BlockKind.SANDWICH: _join_sandwich,
    BlockKind.SUM_NORM: _join_sum_norm,
    BlockKind.POST_NORM: _join_sandwich,  # a sandwich whose sublayers open without a norm
    BlockKind.PRE_NORM: _join_pre_norm,
}
_UNOPENED = (BlockKind.POST_NORM,)
_UNCLOSED = (BlockKind.PRE_NORM,)


def _tensor(norm: Weight | None) -> Tensor | None:
    return None if norm is None else norm.weight


class Phase(nn.Module):
    """Layers of one phase and the order of its tensors.

    Attributes:
        input_names: inputs of `forward`, in order.
        output_names: results of `forward`, in order; no output is named like an input.
        products: how matrix products outside its layers are computed.
        operators: what it calls by name outside its layers.
    """

    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    products = Products()
    operators = Operators()

    def __init__(self, spec: LoopSpec, layers: Sequence[Layer], rope: Rope) -> None:
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleList(layers)
        if layers:
            self.rope = rope
        self._join = JOINS[spec.block]

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name, from tensors of which some are the inputs, by name."""
        outputs = self(*(tensors[name] for name in self.input_names))
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        return dict(zip(self.output_names, outputs, strict=True))

    def _by_name(self, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Inputs by name.

        Raises:
            BuildError: not as many as declared.
        """
        if len(tensors) != len(self.input_names):
            raise BuildError(
                f"{type(self).__name__}: expected {len(self.input_names)} inputs "
                f"({', '.join(self.input_names)}), got {len(tensors)}"
            )
        return dict(zip(self.input_names, tensors, strict=True))

    def _run_layers(
        self, h: Tensor, inputs: Mapping[str, Tensor], last_opening: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run all layers on h, [R, H].

        Args:
            h: the residual stream.
            inputs: the phase's inputs, KV among them if there are layers.
            last_opening: norm weight that follows the last layer, or None.

        Returns:
            The stream, and the stream after that norm (itself if None).
        """
        layers = cast("list[Layer]", list(self.layers))
        if not layers:
            return h, h
        kv, eps, operators = KVInputs.of(inputs), self.spec.norm_eps, self.operators
        openings = [*(_tensor(layer.norm_1) for layer in layers[1:]), last_opening]
        y = _open(operators, h, _tensor(layers[0].norm_1), eps)
        for layer, opening in zip(layers, openings, strict=True):
            attended = layer.attend(y, kv, self.rope)
            inner = _tensor(layer.norm_2), _tensor(layer.norm_3)
            h, y = self._join(operators, attended, h, *inner, eps)
            h, y = self._join(operators, layer.mlp(y), h, _tensor(layer.norm_4), opening, eps)
        return h, y


class Prelude(Phase):
    """Embedding, prelude layers and the initial state of new tokens.

    Inputs: input_ids [T] int32; with layers the KV inputs of T rows; for a random state
    positions and noise_seeds [T] int64, or initial_state [T, H].
    Outputs: state [T, H], and injection [T, H] where loops start with an adapter.
    """

    def __init__(
        self,
        spec: LoopSpec,
        layers: Sequence[Layer],
        rope: Rope,
        embedding: Weight,
        noise_mode: NoiseMode,
    ) -> None:
        super().__init__(spec, layers, rope)
        self.embedding = embedding
        self._draws_noise = False
        names = ["input_ids", *(KVInputs._fields if self.layers else ())]
        if spec.initial_state is InitialState.RANDOM:
            self._draws_noise = noise_mode is NoiseMode.POSITION
            names += ["positions", "noise_seeds"] if self._draws_noise else ["initial_state"]
        self.input_names = tuple(dict.fromkeys(names))
        self.output_names = ("state", "injection") if spec.adapter else ("state",)

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Embed T tokens; returns state, or (state, injection)."""
        inputs = self._by_name(tensors)
        h = F.embedding(inputs["input_ids"], self.embedding.weight)
        if self.spec.embedding_scale != 1.0:
            # PyTorch multiplies by a Python number in float32; an exported graph would round
            # the number to the model dtype first.
            h = (h.float() * self.spec.embedding_scale).to(h.dtype)
        embedded = h
        h, _ = self._run_layers(h, inputs)
        state = self._initial_state(embedded, h, inputs)
        return (state, h) if self.spec.adapter else state

    def _initial_state(self, embedded: Tensor, h: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        if self.spec.initial_state is InitialState.PRELUDE:
            return h.clone() if self.spec.adapter else h  # state and injection are two tensors
        if self.spec.initial_state is InitialState.EMBEDDING:
            return embedded.clone()
        if not self._draws_noise:
            return inputs["initial_state"].clone()
        noise: Tensor = self.operators.position_keyed_noise(
            h,
            inputs["positions"],
            inputs["noise_seeds"],
            std=self.spec.state_std,
            scale=self.spec.state_scale,
        )
        return noise


class Core(Phase):
    """One loop over the rows that go on; the other rows keep their state.

    All rows of a call are in the same loop; where the first loop differs, plane 0 tells it.

    Inputs: state [T, H]; with an adapter injection [T, H]; rows [R] int32; the KV inputs of
    those R rows. Output: next_state [T, H].
    """

    output_names = ("next_state",)

    def __init__(
        self,
        spec: LoopSpec,
        layers: Sequence[Layer],
        rope: Rope,
        *,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        super().__init__(spec, layers, rope)
        hidden = spec.hidden_size
        injection = ("injection",) if spec.adapter else ()
        self.input_names = ("state", *injection, "rows", *KVInputs._fields)
        if spec.adapter:
            self.adapter = Weight(hidden, 2 * hidden, dtype=dtype, device=device)
        if spec.norm_after_loop:
            self.norm = Weight(hidden, dtype=dtype, device=device)
        if spec.exit_gate:
            # Kept with the engine for exits decided per token; no graph evaluates it.
            self.exit_gate = Weight(1, hidden, dtype=dtype, device=device)
            self.exit_gate.bias = _parameter(1, dtype=dtype, device=device)

    def forward(self, *tensors: Tensor) -> Tensor:
        """Run one loop; returns next_state."""
        inputs = self._by_name(tensors)
        operators = self.operators
        state, rows = inputs["state"], inputs["rows"]
        h = operators.compact_gather(state, rows)
        injection = None
        if self.spec.adapter:
            injection = operators.compact_gather(inputs["injection"], rows)
        scattered: Tensor = operators.compact_scatter(state, self.loop(h, injection, inputs), rows)
        return scattered

    def loop(self, h: Tensor, injection: Tensor | None, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run one loop on all R rows given, without gather and scatter.

        Args:
            h: [R, H] their state.
            injection: [R, H] of the same rows, None without an adapter.
            inputs: the KV inputs of those rows.

        Returns:
            [R, H] their next state.
        """
        if injection is not None:
            h = self.products.linear(torch.cat((h, injection), dim=1), self.adapter.weight)
            if self.spec.skip_first_adapter:
                # A select, so that the first loop's input is the injection's own bits.
                h = torch.where(inputs["plane"] == 0, injection, h)
        last_opening = self.norm.weight if self.spec.norm_after_loop else None
        _, closed = self._run_layers(h, inputs, last_opening)
        return closed


class Coda(Phase):
    """Coda layers on all rows, final norm and head on the rows whose logits are used.

    Inputs: state [T, H]; logit_rows [M] int32; with layers the KV inputs of T rows.
    Output: logits [M, V].
    """

    output_names = ("logits",)

    def __init__(
        self,
        spec: LoopSpec,
        layers: Sequence[Layer],
        rope: Rope,
        head: Weight,
        *,
        logits_dtype: torch.dtype,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        super().__init__(spec, layers, rope)
        kv_names = KVInputs._fields if self.layers else ()
        self.input_names = ("state", "logit_rows", *kv_names)
        if spec.norm_before_coda or spec.norm_before_head:
            self.norm = Weight(spec.hidden_size, dtype=dtype, device=device)
        self.head = head
        self._logits_dtype = logits_dtype

    def forward(self, *tensors: Tensor) -> Tensor:
        """Finish T tokens; returns logits of the chosen rows."""
        inputs = self._by_name(tensors)
        operators = self.operators
        h, eps = inputs["state"], self.spec.norm_eps
        if self.spec.norm_before_coda:
            h = operators.fenced_rms_norm(h, self.norm.weight, eps=eps)
        h, _ = self._run_layers(h, inputs)
        h = operators.compact_gather(h, inputs["logit_rows"])
        if self.spec.norm_before_head:
            h = operators.fenced_rms_norm(h, self.norm.weight, eps=eps)
        return self.products.linear(h, self.head.weight).to(self._logits_dtype)


class LoopedModel(nn.Module):
    """A looped model as its three phases; the loops are the caller's.

    A tied head is the embedding's module, and all phases share one Rope.
    """

    def __init__(self, spec: LoopSpec, prelude: Prelude, core: Core, coda: Coda) -> None:
        super().__init__()
        self.spec = spec
        self.prelude = prelude
        self.core = core
        self.coda = coda

    def use_products(self, products: Products) -> None:
        """Compute the matrix products of all phases so from now on."""
        for module in self.modules():
            if isinstance(module, Layer | Phase):
                module.products = products

    def use_operators(self, operators: Operators) -> None:
        """Call these operators in all phases from now on; captured graphs stay what they are."""
        for module in self.modules():
            if isinstance(module, Layer | Phase):
                module.operators = operators

    def joined_products(self) -> tuple[JoinedProduct, ...]:
        """Products of several matrices each, which the checkpoint's own model multiplies apart."""
        layers = [module for module in self.modules() if isinstance(module, Layer)]
        return tuple(dict.fromkeys(product for layer in layers for product in layer.joined))


def build(
    spec: LoopSpec,
    layout: PlaneLayout,
    *,
    max_positions: int,
    dtype: torch.dtype,
    noise_mode: NoiseMode,
    logits_dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
) -> LoopedModel:
    """Make a model with uninitialised weights and finished rope tables.

    Args:
        spec: the model.
        layout: the KV geometry its layers address.
        max_positions: rows of the rope tables.
        dtype: weights and activations.
        noise_mode: how a random initial state comes in.
        logits_dtype: dtype the head's output is cast to.
        device: where the weights live; `meta` holds shapes only.

    Raises:
        BuildError: max_positions is outside what the model defines, or the planes do not tell
            the loops of a model whose first loop differs.
    """
    if spec.skip_first_adapter and layout.strategy.overwrites:
        raise BuildError(
            f"--kv_planes {layout.strategy.name}: the first loop of this model has no adapter and "
            "is told by plane 0, which later loops would write too; use latest"
        )
    if not 1 <= max_positions <= spec.max_position:
        raise BuildError(f"max_positions: expected 1..{spec.max_position}, got {max_positions}")
    rope = Rope(spec, max_positions, dtype=dtype, device=device)
    embedding = Weight(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
    head = embedding
    if not spec.tied_head:
        head = Weight(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)

    def layers(place: Callable[[int], tuple[int, int]], count: int) -> list[Layer]:
        return [Layer(spec, layout, place(i), dtype=dtype, device=device) for i in range(count)]

    prelude = layers(layout.prelude_place, spec.prelude_layers)
    core = layers(layout.core_place, spec.core_layers)
    coda = layers(layout.coda_place, spec.coda_layers)
    return LoopedModel(
        spec,
        Prelude(spec, prelude, rope, embedding, noise_mode),
        Core(spec, core, rope, dtype=dtype, device=device),
        Coda(spec, coda, rope, head, logits_dtype=logits_dtype, dtype=dtype, device=device),
    )


def stored_names(model: nn.Module) -> dict[str, str]:
    """Name under which each entry of `state_dict()` is stored: shared tensors only once.

    Works on the meta device too: tensors are told apart as objects.

    Returns:
        {state_dict name: first state_dict name of the same tensor}.
    """
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def _parameter(*shape: int, dtype: torch.dtype, device: Device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
