"""`looptrt bench KIND ENGINE_DIR`: measure an engine directory.

Owns the flags, the progress bar and the tables on the terminal; leaves measuring to `bench`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from looptrt.cli.engine_options import add_engine_options, engine_config
from looptrt.cli.guard import ANSWER_FAILED, ended_by_signals, show_logs
from looptrt.cli.terminal import Commands, Parser, make_console
from looptrt.errors import LooptrtError

if TYPE_CHECKING:
    from looptrt.bench.setup import Setup
    from looptrt.bench.workload import Question

_LISTS = "comma-separated"
_WIDTH_OF_FILES = 200
_BURST = (
    ("--concurrency", "1,8,32", "N,…", "requests at once, a cell for each"),
    ("--prompt-tokens", 512, "N", "of random prompts"),
    ("--output-tokens", 128, "N", "of each answer"),
)
_LATENCY = (
    ("--batches", "1,8,32,64,128", "N,…", "requests that decode together, a cell for each"),
    ("--prompt-tokens", 512, "N", "of each prompt"),
    ("--output-tokens", 64, "N", "of each answer"),
)
_SESSIONS = (
    ("--count", 16, "N", "conversations"),
    ("--turns", 4, "N", "of each conversation"),
    ("--system-tokens", 1024, "N", "that all conversations begin with"),
    ("--turn-tokens", 256, "N", "that a turn adds before its answer"),
    ("--output-tokens", 64, "N", "of each answer"),
    ("--at-once", 16, "N", "conversations held at the same time"),
)
_POISSON = (
    ("--rates", "1,2,4", "X,…", "arrivals a second, a cell for each"),
    ("--lengths", "512:128", "P:A,…", "tokens of prompt and answer, each pair as likely"),
    ("--requests", 64, "N", "of a run"),
    ("--search-steps", 4, "N", "halvings of the interval that --threshold-ms looks in"),
    ("--search-seconds", 30.0, "S", "for which requests come at least in a run of the search"),
)
_LADDER = (
    ("--concurrency", "1,32", "N,…", "requests at once, a cell for each"),
    ("--prompt-tokens", 512, "N", "of each prompt"),
    ("--output-tokens", 128, "N", "of each answer"),
    ("--answer-tokens", 32, "N", "of an answer to a --questions sample at most"),
)
_KINDS: tuple[tuple[str, str, tuple[tuple[str, Any, str, str], ...]], ...] = (
    ("burst", "C requests at once: throughput, time to first token, time per token", _BURST),
    ("latency", "time per output token of steady batches; steps at saturation", _LATENCY),
    ("sessions", "conversations over shared prefixes, and whether hits change answers", _SESSIONS),
    ("poisson", "arrivals by chance, and the highest rate under a latency", _POISSON),
    ("ladder", "each change with and without it: identical answers, speed, quality", _LADDER),
)


def add_parser(commands: Commands) -> None:
    """Declare `looptrt bench` and its kinds."""
    bench = commands.add_parser("bench", help="measure an engine directory", allow_abbrev=False)
    bench.description = (
        "Measure an engine directory (docs/bench.md). Tables go to stdout, the whole result to "
        "--out. The exit code is 1 when a request failed, or a change broke its rung."
    )
    kinds = bench.add_subparsers(metavar="KIND", required=True, parser_class=Parser)
    for name, text, flags in _KINDS:
        parser = kinds.add_parser(name, help=text, description=text, allow_abbrev=False)
        parser.set_defaults(command=run, kind=name)
        parser.add_argument("engine_dir", type=Path, metavar="ENGINE_DIR")
        for flag, default, metavar, words in flags:
            parser.add_argument(
                flag,
                type=type(default),
                default=default,
                metavar=metavar,
                help=f"{words} (default: {default})",
            )
        _ADDED[name](parser)
        _add_common(parser, has_arms=name != "ladder")
        add_engine_options(parser)


def _add_burst(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts-file", type=Path, metavar="FILE", help="given prompts, in turn: lines or JSON"
    )


def _add_latency(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--saturation",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also record steps with twice as many requests as slots (default: yes)",
    )


def _add_sessions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grid", type=int, metavar="N", help="add an arm with this prefix_grid")
    parser.add_argument(
        "--cold",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with runs without a cache, one at a time (default: yes)",
    )


def _add_poisson(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threshold-ms",
        type=float,
        metavar="X",
        help="find the highest rate whose median latency per output token stays at or under X",
    )


def _add_ladder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--change", action="append", default=[], metavar="NAME", help="only this; repeatable"
    )
    parser.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help="JSON lines with prompt and answer: compare quality on them",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")


_ADDED: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "burst": _add_burst,
    "latency": _add_latency,
    "sessions": _add_sessions,
    "poisson": _add_poisson,
    "ladder": _add_ladder,
}


def _add_common(parser: argparse.ArgumentParser, *, has_arms: bool) -> None:
    group = parser.add_argument_group("runs")
    if has_arms:
        group.add_argument(
            "--arm",
            action="append",
            default=[],
            metavar="NAME=FIELD:VALUE,…",
            help="also run with these settings of engine or request, or the arm base; repeatable",
        )
    group.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="that count, of each arm; one more is made first and dropped (default: 3)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)"
    )
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="(default: 1)")
    group.add_argument("--loops", type=int, metavar="S", help="of generated tokens")
    group.add_argument("--prefill-loops", type=int, metavar="P", help="of prompt tokens")
    group.add_argument(
        "--deadline-s", type=float, default=600.0, metavar="S", help="of one run (default: 600)"
    )
    group.add_argument("--in-process", action="store_true", help="engines in this process")
    group.add_argument("--out", type=Path, metavar="FILE", help="the whole result as JSON")
    group.add_argument("--plot", type=Path, metavar="FILE", help="a picture, such as burst.png")
    group.add_argument("--commit", metavar="TEXT", help="recorded where git cannot tell it")


def run(args: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    from looptrt.bench import plots, results  # noqa: PLC0415 - see cli.build

    # Before anything is measured, which would be lost.
    for path in (args.out, args.plot, getattr(args, "markdown", None)):
        if path is not None and not path.resolve().parent.is_dir():
            raise LooptrtError(f"{path}: there is no folder {path.resolve().parent}")
        if path is not None and path.is_dir():
            raise LooptrtError(f"{path}: expected the name of a file, it is a folder")
    if args.plot is not None:
        plots.require_matplotlib(args.plot)
    with ended_by_signals(), show_logs(logging.WARNING), _progress() as on_run:
        result = _measure(args, _setup(args, on_run))
    if args.out is not None:
        results.write_json(result, args.out)
    failed = _print(result)
    if args.plot is not None:
        plots.draw(result, args.plot)
    if args.kind == "ladder":
        failed += _finish_ladder(args, result)
    return ANSWER_FAILED if failed else 0


def _finish_ladder(args: argparse.Namespace, result: Mapping[str, Any]) -> int:
    """Write the table, and tell which changes broke their rung; returns how many."""
    from looptrt.bench.ladder import broken_promises, markdown  # noqa: PLC0415
    from looptrt.bench.left_out import sentences  # noqa: PLC0415

    if args.markdown is not None:
        args.markdown.write_text(markdown(result), encoding="utf-8")
    if note := sentences(result["left_out"]):
        make_console().print(note)
    broken = broken_promises(result)
    for name, why in broken.items():
        make_console().print(f"NOT R0: {name}: {why}")
    return len(broken)


def _setup(args: argparse.Namespace, on_run: Callable[[str, int], None]) -> Setup:
    from looptrt.bench.arms import Arm  # noqa: PLC0415
    from looptrt.bench.setup import Setup  # noqa: PLC0415
    from looptrt.runtime.sampling_params import SamplingParams  # noqa: PLC0415

    return Setup(
        engine_dir=args.engine_dir,
        config=engine_config(args),
        params=SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            loops=args.loops,
            prefill_loops=args.prefill_loops,
        ),
        others=tuple(map(Arm.parse, getattr(args, "arm", ()))),
        repeats=args.repeats,
        seed=args.seed,
        deadline_s=args.deadline_s,
        in_process=args.in_process,
        commit=args.commit,
        on_run=on_run,
    )


def _measure(args: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    return _MEASURED[args.kind](args, setup)


def _burst(args: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    from looptrt.bench import burst  # noqa: PLC0415

    return burst.measure(
        setup,
        burst.Burst(
            concurrency=_numbers("--concurrency", args.concurrency, int),
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            questions=_questions(args.prompts_file, need_answers=False),
        ),
    )


def _latency(args: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    from looptrt.bench import latency  # noqa: PLC0415

    return latency.measure(
        setup,
        latency.Latency(
            batches=_numbers("--batches", args.batches, int),
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            saturation=args.saturation,
        ),
    )


def _sessions(args: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    from looptrt.bench import sessions  # noqa: PLC0415

    names = [flag.removeprefix("--").replace("-", "_") for flag, *_ in _SESSIONS]
    given = {name: getattr(args, name) for name in (*names, "grid", "cold")}
    return sessions.measure(setup, sessions.Sessions(**given))


def _poisson(args: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    from looptrt.bench import poisson  # noqa: PLC0415
    from looptrt.bench.workload import Lengths  # noqa: PLC0415

    return poisson.measure(
        setup,
        poisson.Poisson(
            rates=_numbers("--rates", args.rates, float),
            lengths=tuple(map(Lengths.parse, args.lengths.split(","))),
            num_requests=args.requests,
            threshold_ms=args.threshold_ms,
            search_steps=args.search_steps,
            search_s=args.search_seconds,
        ),
    )


def _ladder(args: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    from looptrt.bench import changes, ladder  # noqa: PLC0415

    return ladder.measure(
        setup,
        ladder.Ladder(
            changes=changes.changes_named(tuple(args.change)),
            concurrency=_numbers("--concurrency", args.concurrency, int),
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            questions=_questions(args.questions, need_answers=True),
            answer_tokens=args.answer_tokens,
        ),
    )


_MEASURED: Mapping[str, Callable[[argparse.Namespace, Setup], dict[str, Any]]] = {
    "burst": _burst,
    "latency": _latency,
    "sessions": _sessions,
    "poisson": _poisson,
    "ladder": _ladder,
}


def _questions(path: Path | None, *, need_answers: bool) -> tuple[Question, ...]:
    from looptrt.bench.workload import read_questions  # noqa: PLC0415

    return () if path is None else tuple(read_questions(path, need_answers=need_answers))


def _numbers(flag: str, text: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise LooptrtError(f"{flag}: expected numbers, {_LISTS}, got {text!r:.60}") from None


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    """A bar on stderr; told of each run before it starts."""
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    columns, console = (*bars, TimeElapsedColumn()), Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("starting engines", total=None)
        started = 0

        def on_run(label: str, total: int) -> None:
            nonlocal started
            bar.update(task, description=label, total=total or None, completed=started)
            started += 1

        yield on_run


def _print(result: Mapping[str, Any]) -> int:
    """Print a result's table and failed requests; returns how many failed."""
    from looptrt.bench import results, tables  # noqa: PLC0415

    console = make_console()
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    headers, rows = tables.table(result)
    table = Table(*headers, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    for row in rows:
        table.add_row(*row)
    console.print(table)
    failed = results.failed_requests(result)
    for failure in failed[:10]:
        console.print(f"FAILED: {failure}")
    if len(failed) > 10:
        console.print(f"FAILED: {len(failed) - 10} more; --out has them all")
    return len(failed)
