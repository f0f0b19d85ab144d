"""What every operator is called and what goes in and out: the single source, pure data.

Owns names, versions, attributes, tensors with their dtypes and shapes, and exactness levels;
leaves arithmetic to `reference` and the CUDA kernels. The torch schema, the operand checks and
the ONNX and TensorRT definitions derive from it. Invariant: plain data, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from looptrt.errors import PluginError

NAMESPACE = "looptrt"


class Exactness(StrEnum):
    """What an operator's kernels promise about bits (docs/exactness.md).

    A CPU twin keeps the promise except in `packed_plane_attention`, whose sums follow the
    CPU's matrix product.
    """

    EQUALS_TORCH = "equals_torch"  # bits of PyTorch's eager op chain at the same shape
    BATCH_INVARIANT = "batch_invariant"  # bits independent of neighbours, chunks and pages
    DETERMINISTIC = "deterministic"  # same call, same bits
    TOLERANCE = "tolerance"  # within a stated error of the twin


class Kind(StrEnum):
    """Element type of a tensor."""

    FLOAT = "float"  # the model dtype: float32, bfloat16 or float16, one for the whole call
    TABLE = "table"  # the model dtype or float32, one for all tables of the call
    INT32 = "int32"
    INT64 = "int64"


@dataclass(frozen=True)
class Tensor:
    """An operand or result.

    Attributes:
        shape: one expression a dimension, as `Dim.parse` reads it. A symbol has one size
            in a call; those of `derived_sizes` follow from the attributes.
    """

    name: str
    kind: Kind
    shape: tuple[str, ...]


@dataclass(frozen=True)
class OpSchema:
    """One operator.

    Attributes:
        name: stem in every layer: torch op, ONNX op_type, TensorRT plugin name.
        attributes: (name, `int` or `float`) pairs, in order.
        version: TensorRT plugin version.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: tuple[tuple[str, str], ...]
    level: Exactness
    version: str = "1"


@dataclass(frozen=True)
class Dim:
    """Size of one dimension: times * symbol + plus. A plain number has times 0."""

    symbol: str
    times: int
    plus: int

    @staticmethod
    def parse(text: str) -> Dim:
        """Read `4`, `T`, `2*I` or `N+1`."""
        if text.isdigit():
            return Dim("", 0, int(text))
        product, _, plus = text.partition("+")
        times, _, symbol = product.rpartition("*")
        return Dim(symbol, int(times or 1), int(plus or 0))


@dataclass(frozen=True)
class DerivedSize:
    """A size that follows from attributes.

    It is (heads * num_heads + kv_heads * num_kv_heads + plus) * head_dim // by.
    """

    heads: int = 0
    kv_heads: int = 0
    plus: int = 0
    by: int = 1


DERIVED_SIZES = {
    "Q": DerivedSize(heads=1),
    "K": DerivedSize(kv_heads=1),
    "QK": DerivedSize(heads=1, kv_heads=1),
    "QKV": DerivedSize(heads=1, kv_heads=2),
    "PAIRS": DerivedSize(plus=1, by=2),
}


def derived_sizes(attributes: Mapping[str, float]) -> dict[str, int]:
    """Sizes that follow from attributes: the widths of packed projections, pairs of a head."""
    if "num_heads" not in attributes:
        return {}
    heads, kv_heads, head_dim = (
        int(attributes[name]) for name in ("num_heads", "num_kv_heads", "head_dim")
    )
    return {
        symbol: (size.heads * heads + size.kv_heads * kv_heads + size.plus) * head_dim // size.by
        for symbol, size in DERIVED_SIZES.items()
    }


def operand_error(op: str, operand: str, expected: object, got: object) -> PluginError:
    """Say which operand of which operator is wrong, what was expected and what came."""
    return PluginError(f"{op}: {operand}: expected {expected}, got {got}")


def torch_schema(op: OpSchema) -> str:
    """`torch.library` schema of an operator: tensors first, attributes by keyword."""
    inputs = [f"Tensor {tensor.name}" for tensor in op.inputs]
    attributes = [f"{kind} {name}" for name, kind in op.attributes]
    arguments = ", ".join([*inputs, "*", *attributes] if attributes else inputs)
    results = ", ".join(f"Tensor {tensor.name}" for tensor in op.outputs)
    return f"{op.name}({arguments}) -> ({results})"


def _float(name: str, *shape: str) -> Tensor:
    return Tensor(name, Kind.FLOAT, shape)


def _table(name: str, *shape: str) -> Tensor:
    return Tensor(name, Kind.TABLE, shape)


def _int32(name: str, *shape: str) -> Tensor:
    return Tensor(name, Kind.INT32, shape)


def _int64(name: str, *shape: str) -> Tensor:
    return Tensor(name, Kind.INT64, shape)


_EPS = (("eps", "float"),)
_HEADS = (("num_heads", "int"), ("num_kv_heads", "int"), ("head_dim", "int"))
_ROPE_TABLES = (
    _int32("positions", "T"),
    _table("cos", "max_positions", "PAIRS"),
    _table("sin", "max_positions", "PAIRS"),
)

OPS = (
    OpSchema(
        "fenced_rms_norm",
        inputs=(_float("x", "T", "H"), _float("weight", "H")),
        outputs=(_float("y", "T", "H"),),
        attributes=_EPS,
        level=Exactness.EQUALS_TORCH,
    ),
    OpSchema(
        "fenced_add_rms_norm",
        inputs=(_float("x", "T", "H"), _float("residual", "T", "H"), _float("weight", "H")),
        outputs=(_float("y", "T", "H"),),
        attributes=_EPS,
        level=Exactness.EQUALS_TORCH,
    ),
    OpSchema(
        "fenced_rms_norm_add_rms_norm",
        inputs=(
            _float("x", "T", "H"),
            _float("residual", "T", "H"),
            _float("weight", "H"),
            _float("next_weight", "H"),
        ),
        outputs=(_float("h", "T", "H"), _float("y", "T", "H")),
        attributes=_EPS,
        level=Exactness.EQUALS_TORCH,
    ),
    OpSchema(
        "fenced_add_rms_norm_rms_norm",
        inputs=(
            _float("x", "T", "H"),
            _float("residual", "T", "H"),
            _float("weight", "H"),
            _float("next_weight", "H"),
        ),
        outputs=(_float("h", "T", "H"), _float("y", "T", "H")),
        attributes=_EPS,
        level=Exactness.EQUALS_TORCH,
    ),
    OpSchema(
        "fenced_qk_norm",
        inputs=(_float("qkv", "T", "QKV"), _float("q_weight", "Q"), _float("k_weight", "K")),
        outputs=(_float("normed", "T", "QKV"),),
        attributes=(*_HEADS, *_EPS),
        level=Exactness.EQUALS_TORCH,
    ),
    OpSchema(
        "fenced_rope",
        inputs=(_float("qkv", "T", "QKV"), *_ROPE_TABLES),
        outputs=(_float("rotated", "T", "QKV"),),
        attributes=(*_HEADS, ("interleaved", "int")),
        level=Exactness.EQUALS_TORCH,
    ),
    OpSchema(
        "fenced_bias_rope",
        inputs=(_float("qkv", "T", "QKV"), _float("bias", "QK"), *_ROPE_TABLES),
        outputs=(_float("rotated", "T", "QKV"),),
        attributes=(*_HEADS, ("interleaved", "int")),
        level=Exactness.EQUALS_TORCH,
    ),
    OpSchema(
        "fenced_silu_mul",
        inputs=(_float("gate_up", "T", "2*I"),),
        outputs=(_float("y", "T", "I"),),
        attributes=(),
        level=Exactness.EQUALS_TORCH,
    ),
    OpSchema(
        "packed_plane_attention",
        inputs=(
            _float("qkv", "R", "QKV"),
            _int32("positions", "R"),
            _int32("cu_seqlens", "N+1"),
            _int32("seq_slots", "N"),
            _int32("block_table", "max_slots", "num_rows", "max_pages"),
            _int64("kv_pool", "2"),  # address of unit 0, number of units
            _int32("plane", "1"),
        ),
        outputs=(_float("attended", "R", "Q"),),
        attributes=(
            *_HEADS,
            ("page_size", "int"),
            ("unit_slots", "int"),
            ("row", "int"),
            ("slot", "int"),
            ("scale", "float"),
        ),
        level=Exactness.BATCH_INVARIANT,
    ),
    OpSchema(
        "compact_gather",
        inputs=(_float("x", "T", "H"), _int32("rows", "R")),
        outputs=(_float("gathered", "R", "H"),),
        attributes=(),
        level=Exactness.EQUALS_TORCH,
    ),
    OpSchema(
        "compact_scatter",
        inputs=(_float("x", "T", "H"), _float("update", "R", "H"), _int32("rows", "R")),
        outputs=(_float("scattered", "T", "H"),),
        attributes=(),
        level=Exactness.EQUALS_TORCH,
    ),
    OpSchema(
        "position_keyed_noise",
        inputs=(_float("like", "T", "H"), _int32("positions", "T"), _int64("seeds", "T")),
        outputs=(_float("noise", "T", "H"),),
        attributes=(("std", "float"), ("scale", "float")),
        level=Exactness.DETERMINISTIC,
    ),
)
