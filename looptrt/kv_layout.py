"""Where the KV of a token lives: units, rows of the block table, slots, bytes.

Owns every formula about units and planes (docs/kv_layout.md draws them); leaves which
unit a page owns to `runtime.kv`. Invariant: rows 0..boundary_units-1 of a table are the
prelude and coda layers, row boundary_units + t is plane t, and unit 0 is never owned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from looptrt.errors import BuildError
from looptrt.loop_spec import LoopSpec

MAX_LOOPS = 2**15 - 1  # recorded depths are int16
_LEAST = {
    "unit_slots": 1,
    "prelude_layers": 0,
    "coda_layers": 0,
    "max_loops": 1,
    "page_size": 1,
    "num_kv_heads": 1,
    "head_dim": 1,
}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class PlaneStrategy:
    """Map from loop to plane.

    `latest` keeps one plane per loop; `shared` and `compress-sN` reuse planes in a ring
    and overwrite them, so their results depend on the chunk schedule.

    Attributes:
        name: `latest`, `shared` or `compress-sN`.
        ring: planes in the ring, None for one plane per loop.
    """

    name: str
    ring: int | None

    @staticmethod
    def parse(name: str, core_layers: int) -> PlaneStrategy:
        """Read a strategy name.

        Raises:
            BuildError: the name is unknown, or N of `compress-sN` is not a positive
                multiple of the layers of the core.
        """
        if name == "latest":
            return PlaneStrategy(name, None)
        if name == "shared":
            return PlaneStrategy(name, 1)
        prefix, _, digits = name.partition("compress-s")
        if prefix == "" and digits.isascii() and digits.isdigit():
            slots = int(digits)
            if slots == 0 or slots % core_layers:
                raise BuildError(
                    f"kv_planes {name!r}: N must be a positive multiple of the core's "
                    f"{core_layers} layers, got {slots}"
                )
            return PlaneStrategy(name, slots // core_layers)
        raise BuildError(
            f"kv_planes: unknown strategy {name!r}, expected latest, shared or compress-sN"
        )

    @property
    def overwrites(self) -> bool:
        """Whether a later loop overwrites an earlier one's KV."""
        return self.ring is not None

    def num_planes(self, num_loops: int) -> int:
        """Planes that hold the KV of a token of depth `num_loops`."""
        return num_loops if self.ring is None else min(self.ring, num_loops)

    def plane(self, loop_idx: int) -> int:
        """Plane that loop `loop_idx` (from 0) writes and reads."""
        return loop_idx if self.ring is None else loop_idx % self.ring


@dataclass(frozen=True)
class PlaneLayout:
    """Geometry of the KV pool.

    A unit is [unit_slots, 2 (K, V), page_size, num_kv_heads, head_dim] of `dtype`:
    the KV of one page in one plane, contiguous.

    Attributes:
        unit_slots: b, layer slots in a unit: the layers of the core.
        prelude_layers, coda_layers: layers written once per token (boundary slots).
        max_loops: deepest loop count a request may ask for.
        page_size: tokens of a page (`tokens_per_block`).
    """

    unit_slots: int
    prelude_layers: int
    coda_layers: int
    max_loops: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    strategy: PlaneStrategy

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BuildError(f"{name}: expected an integer of at least {least}, got {value!r}")
        if self.max_loops > MAX_LOOPS:
            raise BuildError(f"max_loops: expected at most {MAX_LOOPS}, got {self.max_loops}")
        if self.dtype not in DTYPE_BYTES:
            raise BuildError(f"KV dtype: expected one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}")

    @staticmethod
    def of(
        spec: LoopSpec, *, page_size: int, max_loops: int, dtype: str, kv_planes: str
    ) -> PlaneLayout:
        """Layout of a model's KV.

        Raises:
            BuildError: unknown strategy or dtype, or a size out of range.
        """
        return PlaneLayout(
            unit_slots=spec.core_layers,
            prelude_layers=spec.prelude_layers,
            coda_layers=spec.coda_layers,
            max_loops=max_loops,
            page_size=page_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            strategy=PlaneStrategy.parse(kv_planes, spec.core_layers),
        )

    @property
    def boundary_units(self) -> int:
        """B: units of a page that hold the prelude and coda layers."""
        return -(-(self.prelude_layers + self.coda_layers) // self.unit_slots)

    @property
    def num_planes(self) -> int:
        """Planes of a token of the deepest request."""
        return self.strategy.num_planes(self.max_loops)

    @property
    def num_rows(self) -> int:
        """Rows of the block table: boundary units, then planes."""
        return self.boundary_units + self.num_planes

    @property
    def unit_shape(self) -> tuple[int, int, int, int, int]:
        """[unit_slots, 2, page_size, num_kv_heads, head_dim]."""
        return (self.unit_slots, 2, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def slot_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in one layer slot."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return self.unit_slots * self.page_size * self.slot_bytes_per_token

    def planes_of_depth(self, depth: int) -> int:
        """Planes that a token of `depth` loops writes."""
        return self.strategy.num_planes(depth)

    def units_of_page(self, depth: int) -> int:
        """Units owned by a page whose deepest token runs `depth` loops."""
        return self.boundary_units + self.planes_of_depth(depth)

    def all_layers_units(self, depth: int) -> float:
        """Units' worth of memory of such a page if the plane of every loop held all layers."""
        layers = self.prelude_layers + self.unit_slots + self.coda_layers
        return self.planes_of_depth(depth) * layers / self.unit_slots

    def bytes_per_token(self, depth: int) -> int:
        """Pool bytes a token of a full page of uniform `depth` takes."""
        return self.units_of_page(depth) * self.unit_slots * self.slot_bytes_per_token

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def prelude_place(self, layer: int) -> tuple[int, int]:
        """(table row, slot) of a prelude layer."""
        return divmod(layer, self.unit_slots)

    def coda_place(self, layer: int) -> tuple[int, int]:
        """(table row, slot) of a coda layer."""
        return divmod(self.prelude_layers + layer, self.unit_slots)

    def core_place(self, layer: int) -> tuple[int, int]:
        """(table row of plane 0, slot) of a core layer; the loop's plane is added."""
        return self.boundary_units, layer

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` restores an equal layout."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**data, "strategy": self.strategy.name}

    @staticmethod
    def from_json(data: dict[str, Any]) -> PlaneLayout:
        """Restore a layout written by `to_json`."""
        fields = dict(data)
        strategy = PlaneStrategy.parse(fields.pop("strategy"), fields["unit_slots"])
        return PlaneLayout(strategy=strategy, **fields)
