"""Whether this machine's kernels give the bits they promise, on the shapes of an engine.

Owns operands, comparison and verdicts; leaves which calls an engine makes to `models`, attention
to `probe_attention` and what follows from a verdict to `runtime` and the command line.
Invariant: an operator counts as sound only for what was compared, and a kernel that refuses an
operand has failed on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from looptrt.errors import PluginError
from looptrt.plugins import reference, schema, unfused
from looptrt.plugins.schema import Dim, Exactness, Kind, OpSchema

Operators = Mapping[str, Callable[..., Any]]

# PyTorch's row sums change their order with the row count at 1, 2, 4, 8 and 16 (docs/exactness.md).
QUICK_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 32, 64, 100, 256)
ALL_ROWS = (*range(1, 257), 512, 1024, 2048, 4096, 8192)
ATTENTION = "packed_plane_attention"

_BY_NAME = {op.name: op for op in schema.OPS}
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_SCALES = (1.0, 10.0, 0.1)
# Sizes that change from step to step; all others belong to the engine.
_STEP_SIZES = frozenset({"T", "R", "N", "max_slots", "max_pages"})
# The CPU twin of the noise, whose bits know no row count, takes a second for 5,000,000 draws.
_MOST_DRAWS = 2_000_000


@dataclass(frozen=True)
class OpCall:
    """One way in which an engine calls an operator, whatever the step.

    Attributes:
        op: the operator's name.
        sizes: (symbol of the schema's shapes, size) of those that do not change.
        attributes: (name, value) pairs.
        dtype: the model's, as torch names it.
        table_dtype: of the rope tables; the model's where there are none.
    """

    op: str
    sizes: tuple[tuple[str, int], ...]
    attributes: tuple[tuple[str, float], ...]
    dtype: str
    table_dtype: str

    @staticmethod
    def of(
        op: OpSchema,
        sizes: Mapping[str, int],
        attributes: Mapping[str, float],
        dtypes: Mapping[Kind, torch.dtype],
    ) -> OpCall:
        """The call behind bound operands."""
        kept = {name: size for name, size in sizes.items() if name not in _STEP_SIZES}
        return OpCall(
            op.name,
            tuple(sorted(kept.items())),
            tuple(sorted(attributes.items())),
            _name(dtypes[Kind.FLOAT]),
            _name(dtypes.get(Kind.TABLE, dtypes[Kind.FLOAT])),
        )

    @property
    def schema(self) -> OpSchema:
        """The operator's schema."""
        return _BY_NAME[self.op]


@dataclass
class Verdict:
    """What was compared of one call, and what differed.

    Attributes:
        call: what was compared.
        level: what the operator promises.
        against: what it was compared with.
        rows: row counts that were compared.
        elements: results compared.
        mismatches: those whose bits differ, or that are out of tolerance.
        first: the first case that differs or was refused; empty without one.
    """

    call: OpCall
    level: Exactness
    against: str
    rows: list[int] = field(default_factory=list)
    elements: int = 0
    mismatches: int = 0
    first: str = ""

    @property
    def holds(self) -> bool:
        """Whether something was compared and nothing differed."""
        return self.elements > 0 and self.mismatches == 0

    def count(self, case: str, wrong: int, elements: int) -> None:
        """Add a comparison."""
        self.elements += elements
        self.mismatches += wrong
        if wrong and not self.first:
            self.first = f"{case}: {wrong} of {elements} differ"

    def refused(self, case: str, error: PluginError) -> None:
        """Add a case that the kernel did not take."""
        self.elements += 1
        self.mismatches += 1
        self.first = self.first or f"{case}: {error}"


class Clock:
    """How long a probe may go on.

    Args:
        seconds: None is without end.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def is_over(self) -> bool:
        """Whether no further case should start."""
        return self._end is not None and time.monotonic() > self._end


def probe_rows(
    calls: Iterable[OpCall],
    rows: Sequence[int],
    device: torch.device,
    operators: Operators,
    clock: Clock,
) -> list[Verdict]:
    """Compare operators that work row by row with what they promise to equal.

    All calls are compared at a row count before the next is taken, so that a clock that runs
    out leaves every operator with the same coverage: at least the first row count.

    Args:
        calls: of an engine; attention's are left out.
        rows: row counts, those that matter most first.
        device: where to run.
        operators: the kernels, by operator name.
        clock: when to stop.
    """
    verdicts = [_open(call) for call in calls if call.op != ATTENTION]
    generator = torch.Generator(device=device).manual_seed(0)
    for index, count in enumerate(rows):
        for verdict in verdicts:
            if index and clock.is_over():
                return verdicts
            if _is_too_long(verdict.call, count):
                continue
            operands = make_operands(verdict.call, count, generator, _SCALES[index % 3])
            _compare(verdict, count, operands, operators)
    return verdicts


def _open(call: OpCall) -> Verdict:
    against = "PyTorch's operators"
    if call.schema.level is not Exactness.EQUALS_TORCH:
        against = "its CPU twin"
    return Verdict(call, call.schema.level, against)


def _is_too_long(call: OpCall, count: int) -> bool:
    if call.schema.level is not Exactness.DETERMINISTIC or count == 1:
        return False
    return count not in QUICK_ROWS or count * dict(call.sizes)["H"] > _MOST_DRAWS


def _compare(verdict: Verdict, count: int, operands: list[Tensor], operators: Operators) -> None:
    call = verdict.call
    attributes: dict[str, Any] = dict(call.attributes)
    want = _expected(call, operands, attributes)
    case = f"{call.dtype} {[list(operand.shape) for operand in operands]}"
    if operands[0].is_cuda:
        _poison(want)
    verdict.rows.append(count)
    try:
        got = _tuple(operators[call.op](*operands, **attributes))
    except PluginError as error:
        verdict.refused(case, error)
        return
    for one, other in zip(got, want, strict=True):
        verdict.count(case, num_different(one, other), other.numel())


def _expected(
    call: OpCall, operands: list[Tensor], attributes: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    if call.schema.level is Exactness.EQUALS_TORCH:
        return _tuple(unfused.FORMS[call.op](*operands, **attributes))
    twin = getattr(reference, call.op)(*(operand.cpu() for operand in operands), **attributes)
    return tuple(result.to(operands[0].device) for result in _tuple(twin))


def _poison(results: Sequence[Tensor]) -> None:
    """Leave NaN in the memory that the next results of these shapes will get."""
    del [torch.full_like(result, math.nan) for result in results][:]


def num_different(got: Tensor, want: Tensor) -> int:
    """Elements whose bits differ; all of them where dtype or shape does."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return max(1, want.numel())
    kind = _BITS[want.dtype]
    return int((got.contiguous().view(kind) != want.contiguous().view(kind)).sum())


def make_operands(
    call: OpCall, count: int, generator: torch.Generator, scale: float = 1.0
) -> list[Tensor]:
    """Random operands of a call with `count` rows, on the generator's device.

    Where rows are chosen from others (R of T), about two thirds are, in random order.
    """
    sizes = {**dict(call.sizes), "T": count, "R": max(1, 2 * count // 3)}
    operands = []
    for tensor in call.schema.inputs:
        shape = [_size(dim, sizes) for dim in map(Dim.parse, tensor.shape)]
        operands.append(_operand(call, tensor, shape, sizes, generator) * _scale(tensor, scale))
    return operands


def _scale(tensor: schema.Tensor, scale: float) -> float | int:
    return scale if tensor.kind is Kind.FLOAT and len(tensor.shape) > 1 else 1


def _size(dim: Dim, sizes: Mapping[str, int]) -> int:
    return dim.times * sizes[dim.symbol] + dim.plus if dim.times else dim.plus


def _operand(
    call: OpCall,
    tensor: schema.Tensor,
    shape: list[int],
    sizes: Mapping[str, int],
    generator: torch.Generator,
) -> Tensor:
    device = generator.device
    if tensor.kind is Kind.INT64:
        return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator, device=device)
    if tensor.kind is Kind.INT32:
        return _indices(tensor, shape, sizes, generator)
    drawn = torch.randn(shape, generator=generator, device=device)
    if tensor.kind is Kind.TABLE:
        turn = torch.cos if tensor.name == "cos" else torch.sin
        return turn(drawn * 10).to(getattr(torch, call.table_dtype))
    return drawn.to(getattr(torch, call.dtype))


def _indices(
    tensor: schema.Tensor, shape: list[int], sizes: Mapping[str, int], generator: torch.Generator
) -> Tensor:
    """Rows of x, all different; or positions, which rope tables limit."""
    device = generator.device
    if tensor.name == "rows":
        order = torch.randperm(sizes["T"], generator=generator, device=device)
        return order[: shape[0]].int()
    end = sizes.get("max_positions", 2**31 - 1)
    return torch.randint(0, end, shape, generator=generator, device=device, dtype=torch.int32)


def _tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def failures(verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
    """Those that do not hold."""
    return (verdict for verdict in verdicts if not verdict.holds)
