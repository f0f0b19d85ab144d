"""Numbers from numbers: spreads, medians over repeats, paired differences.

Owns the formulas; leaves what they are about to the callers. Invariant: an empty sample has no
spread, never a zero one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

PERCENTILES = (50, 90, 99)
# A change of quality beyond this many points counts; so a standard error must resolve it.
LIMIT_POINTS = 1.0


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks, as NumPy's default.

    Args:
        values: at least one, in any order.
        percent: 0 to 100.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """`mean`, `p50`, `p90`, `p99` and the number of values `n`; None without values."""
    if not values:
        return None
    points = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return {"n": len(values), "mean": statistics.fmean(values), **points}


def medians(repeats: Sequence[Any]) -> Any:  # noqa: ANN401 - the repeats' own shape
    """Element by element the median of results of one shape.

    Numbers become their median. Where a result has none (None), the others count; what is
    neither a number nor a mapping is left out.
    """
    present = [repeat for repeat in repeats if repeat is not None]
    if present and all(isinstance(repeat, dict) for repeat in present):
        names = dict.fromkeys(name for repeat in present for name in repeat)
        merged = {name: medians([repeat.get(name) for repeat in present]) for name in names}
        return {name: value for name, value in merged.items() if value is not None}
    numbers = [value for value in present if _is_number(value)]
    return statistics.median(numbers) if numbers else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Verdict(StrEnum):
    """What a paired comparison of answers says about a change."""

    PASS = "pass"
    FAIL = "fail"
    UNRESOLVED = "unresolved"  # two standard errors are more than the limit


@dataclass(frozen=True)
class PairedDifference:
    """Right answers with a change against without it, on the same samples.

    Attributes:
        num_samples: pairs.
        right_with, right_without: right answers of each side.
        points: difference of the shares in percentage points, negative where the change harms.
        standard_error: of `points`, from the pairs.
    """

    num_samples: int
    right_with: int
    right_without: int
    points: float
    standard_error: float

    @staticmethod
    def of(with_change: Sequence[bool], without: Sequence[bool]) -> PairedDifference:
        """Compare two runs, sample by sample; at least two samples."""
        differences = [int(a) - int(b) for a, b in zip(with_change, without, strict=True)]
        deviation = statistics.stdev(differences)
        return PairedDifference(
            num_samples=len(differences),
            right_with=sum(with_change),
            right_without=sum(without),
            points=100 * statistics.fmean(differences),
            standard_error=100 * deviation / math.sqrt(len(differences)),
        )

    @property
    def verdict(self) -> Verdict:
        """A loss beyond the limit fails; a difference that is too uncertain is neither."""
        if 2 * self.standard_error > LIMIT_POINTS:
            return Verdict.UNRESOLVED
        return Verdict.FAIL if self.points < -LIMIT_POINTS else Verdict.PASS
