"""Exact match of the tiny models over loops and (S, P), served by the engine.

Builds both engine directories, answers held-out samples of the look-up task at every depth
point of the models' cards, and writes the measured tables beside the published ones:
`python benchmarks/depth_quality.py [--samples 4096]`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from looptrt import LLM, SamplingParams, __version__
from looptrt.builder.build import BuildConfig, build
from looptrt.runtime.config import EngineConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from lookup_task import NUM_ANSWER_TOKENS, Sample, held_out  # noqa: E402 - found by the line above

FAMILIES = ("ouro", "huginn")
MAX_LOOPS = {"ouro": 4, "huginn": 16}
HOPS = (1, 2, 3, 4)
_BATCH = 512


@dataclass(frozen=True)
class Published:
    """A row of a model card's first table.

    Attributes:
        exact: exact match on 4,096 held-out samples.
        by_hops: the same for samples of 1, 2, 3 and 4 hops.
        on_500: on the first 500 of them, the evaluation file.
    """

    exact: float
    by_hops: tuple[float, float, float, float]
    on_500: float


UNIFORM = {
    "ouro": {
        1: Published(0.4182, (1.000, 0.220, 0.219, 0.228), 0.404),
        2: Published(0.9690, (1.000, 0.994, 0.956, 0.926), 0.964),
        3: Published(0.9988, (1.000, 0.999, 0.998, 0.998), 0.998),
        4: Published(0.9988, (1.000, 0.999, 0.998, 0.998), 1.000),
    },
    "huginn": {
        1: Published(0.2498, (0.991, 0.001, 0.000, 0.000), 0.226),
        2: Published(0.4941, (0.990, 0.993, 0.002, 0.000), 0.486),
        3: Published(0.7463, (0.992, 0.994, 0.993, 0.000), 0.744),
        4: Published(0.9944, (0.993, 0.994, 0.994, 0.996), 0.992),
        5: Published(0.9941, (0.993, 0.994, 0.992, 0.997), 0.992),
        6: Published(0.9941, (0.994, 0.994, 0.992, 0.996), 0.990),
        7: Published(0.9934, (0.994, 0.994, 0.991, 0.994), 0.990),
        8: Published(0.9937, (0.995, 0.994, 0.990, 0.995), 0.990),
        10: Published(0.9912, (0.993, 0.993, 0.989, 0.990), 0.990),
        12: Published(0.9885, (0.992, 0.992, 0.986, 0.984), 0.988),
        16: Published(0.9856, (0.990, 0.990, 0.981, 0.981), 0.984),
    },
}
"""Published exact match, prompt and answer at the same loops."""

PAIRS = {
    "ouro": {
        (2, 1): 0.6909,
        (3, 1): 0.8032,
        (3, 2): 0.9951,
        (4, 1): 0.8789,
        (4, 2): 0.9980,
        (4, 3): 0.9988,
    },
    "huginn": {
        (2, 1): 0.4946,
        (3, 1): 0.7458,
        (3, 2): 0.7468,
        (4, 1): 0.9912,
        (4, 2): 0.9939,
        (4, 3): 0.9941,
        (6, 1): 0.9846,
        (6, 2): 0.9915,
        (6, 3): 0.9939,
        (6, 4): 0.9937,
        (8, 1): 0.9719,
        (8, 2): 0.9878,
        (8, 3): 0.9919,
        (8, 4): 0.9927,
    },
}
"""Published exact match at (S, P) with P below S, 4,096 samples."""


@dataclass(frozen=True)
class Score:
    """Exact match at one depth point; `right` says which samples were answered exactly."""

    loops: int
    prefill_loops: int
    hops: tuple[int, ...]
    right: tuple[bool, ...]
    seconds: float

    @property
    def exact(self) -> float:
        """Share of all samples."""
        return sum(self.right) / len(self.right)

    def exact_of(self, hops: int) -> float | None:
        """Share of the samples with so many hops, None if there are none."""
        right = [hit for hit, h in zip(self.right, self.hops, strict=True) if h == hops]
        return sum(right) / len(right) if right else None

    def to_json(self) -> dict[str, Any]:
        """What results/depth_quality.json holds of this point."""
        return {
            "loops": self.loops,
            "prefill_loops": self.prefill_loops,
            "exact": self.exact,
            "exact_by_hops": {h: self.exact_of(h) for h in HOPS},
            "samples_by_hops": {h: self.hops.count(h) for h in HOPS},
            "seconds": round(self.seconds, 2),
        }


def build_engine(family: str, directory: Path) -> Path:
    """Build the tiny model's engine directory and return it."""
    engine_dir = directory / f"tiny-{family}"
    build(
        BuildConfig(
            checkpoint_dir=ROOT / "examples" / f"tiny-{family}",
            output_dir=engine_dir,
            max_seq_len=64,
            max_loops=MAX_LOOPS[family],
        )
    )
    return engine_dir


def score(
    llm: LLM,
    samples: Sequence[Sample],
    loops: int,
    prefill_loops: int,
    advance: Callable[[int], None] = lambda count: None,
) -> Score:
    """Answer every sample greedily at (S, P) and compare with the right answers.

    Args:
        llm: an engine of a tiny model.
        samples: questions; each prompt is sent as text.
        loops: S, of the last prompt token and the answer.
        prefill_loops: P, of the other prompt tokens.
        advance: told how many more samples are done.
    """
    params = SamplingParams(max_tokens=NUM_ANSWER_TOKENS, loops=loops, prefill_loops=prefill_loops)
    begin_s, right = time.perf_counter(), []
    for start in range(0, len(samples), _BATCH):
        batch = samples[start : start + _BATCH]
        outputs = llm.generate([sample.prompt for sample in batch], params)
        for sample, output in zip(batch, outputs, strict=True):
            answer = output.outputs[0]
            right.append(answer.finish_reason == "stop" and answer.text == sample.answer)
        advance(len(batch))
    hops = tuple(sample.hops for sample in samples)
    seconds = time.perf_counter() - begin_s
    return Score(loops, prefill_loops, hops, tuple(right), seconds)


def depth_points(family: str) -> list[tuple[int, int]]:
    """Every (S, P) that the model's card has a number for."""
    return [(loops, loops) for loops in UNIFORM[family]] + list(PAIRS[family])


def markdown(results: dict[str, Any], scores: dict[str, list[Score]]) -> str:
    """The tables, measured / published."""
    count = results["samples"]
    lines = [
        "# Exact match over loops and (S, P)",
        "",
        f"{results['date']}, commit {results['commit']}, looptrt {results['looptrt']}, "
        f"torch {results['torch']}, Python {results['python']}, {results['machine']}. "
        f"{count} held-out samples; each cell is measured / published "
        "(4,096 samples; Huginn with another draw of initial states).",
    ]
    for family, points in scores.items():
        uniform = {point.loops: point for point in points if point.loops == point.prefill_loops}
        lines += ["", f"## tiny-{family}, same loops everywhere", ""]
        lines += ["| loops | all | 1 hop | 2 hops | 3 hops | 4 hops |", "|---|---|---|---|---|---|"]
        for loops, point in uniform.items():
            card = UNIFORM[family][loops]
            cells = [f"{point.exact:.4f} / {card.exact:.4f}"]
            for hops, published in zip(HOPS, card.by_hops, strict=True):
                measured = point.exact_of(hops)
                cells.append(f"{'–' if measured is None else f'{measured:.3f}'} / {published:.3f}")
            lines.append(f"| {loops} | {' | '.join(cells)} |")
        depths = sorted({prefill for _, prefill in PAIRS[family]})
        lines += ["", f"## tiny-{family}, S down, P across (P below S)", ""]
        lines += [f"| S \\ P | {' | '.join(map(str, depths))} |", "|---" * (len(depths) + 1) + "|"]
        by_pair = {(point.loops, point.prefill_loops): point for point in points}
        for loops in sorted({loops for loops, _ in PAIRS[family]}):
            cells = [
                f"{by_pair[loops, prefill].exact:.4f} / {PAIRS[family][loops, prefill]:.4f}"
                if (loops, prefill) in by_pair and (loops, prefill) in PAIRS[family]
                else ""
                for prefill in depths
            ]
            lines.append(f"| {loops} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def commit() -> str:
    """Short hash of the source tree, with a mark when files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def measure(families: Sequence[str], samples: Sequence[Sample]) -> dict[str, list[Score]]:
    """Build the engines and score every depth point, with a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    scores: dict[str, list[Score]] = {}
    # Tiny matrices: a second thread costs more than it brings.
    config = EngineConfig(num_threads=1)
    with (
        tempfile.TemporaryDirectory() as directory,
        Progress(*columns, TimeElapsedColumn()) as progress,
    ):
        for family in families:
            points, scores[family] = depth_points(family), []
            bar = progress.add_task(f"tiny-{family}", total=len(points) * len(samples))
            with LLM(build_engine(family, Path(directory)), config) as llm:
                for loops, prefill in points:
                    progress.update(bar, description=f"tiny-{family} S={loops} P={prefill}")
                    advance = partial(progress.advance, bar)
                    scores[family].append(score(llm, samples, loops, prefill, advance))
    return scores


def main() -> None:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4096, help="held-out samples, in order")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="default: both")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    samples = list(islice(held_out(), options.samples))
    scores = measure(options.family or FAMILIES, samples)
    results: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "looptrt": __version__,
        "torch": version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "samples": len(samples),
        "models": {
            f"tiny-{family}": [
                point.to_json() | {"published": published(family, point)} for point in points
            ]
            for family, points in scores.items()
        },
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "depth_quality.json").write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(results, scores)
    (options.out / "depth_quality.md").write_text(text)
    print(text)


def published(family: str, point: Score) -> float:
    """The card's exact match at this point."""
    if point.loops == point.prefill_loops:
        return UNIFORM[family][point.loops].exact
    return PAIRS[family][point.loops, point.prefill_loops]


if __name__ == "__main__":
    main()
