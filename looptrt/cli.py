"""The command line: `looptrt` with its subcommands, and `trtllm-build`.

Owns arguments, what is printed and exit codes; leaves the work to `builder`, `runtime` and
`doctor`. Invariant: an error is one line on stderr and exit code 2, never a traceback.
"""

from __future__ import annotations

try:  # an interrupt before `_guard` is up ends without a traceback, too
    import argparse
    import contextlib
    import dataclasses
    import io
    import json
    import logging
    import os
    import re
    import resource
    import signal
    import sys
    import threading
    from collections import deque
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import FrameType
    from typing import Any, NoReturn

    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from looptrt import __version__, doctor
    from looptrt.errors import LooptrtError
    from looptrt.manifest import Manifest
    from looptrt.runtime.config import EngineConfig
    from looptrt.runtime.llm import LLM, AnswerStream
    from looptrt.runtime.outputs import CompletionOutput, RequestOutput
    from looptrt.runtime.request import FinishReason
    from looptrt.runtime.sampling_params import SamplingParams
except KeyboardInterrupt:
    raise SystemExit(130) from None

DIFFERS = 1
ANSWER_FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + signal.SIGPIPE

_STREAMS_AHEAD = 64  # requests that run while earlier answers are printed
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_MOST_MEMORY = 2**60
_BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

_logger = logging.getLogger(__name__)

_SAMPLING_FLAGS = (
    ("--n", int, "N", "answers to each prompt (default: 1)"),
    ("--max-tokens", int, "N", "new tokens at most (default: 32)"),
    ("--min-tokens", int, "N", "new tokens before the answer may end (default: 0)"),
    ("--temperature", float, "T", "0 is greedy (default: 0)"),
    ("--top-k", int, "K", "keep the K most likely tokens; 0 keeps all (default: 0)"),
    ("--top-p", float, "P", "keep the most likely tokens up to probability P (default: 1)"),
    ("--min-p", float, "P", "drop tokens below P times the most likely one (default: 0)"),
    ("--repetition-penalty", float, "X", "above 1 makes known tokens less likely (default: 1)"),
    ("--presence-penalty", float, "X", "off the logits of the answer's tokens (default: 0)"),
    ("--frequency-penalty", float, "X", "the same each time a token came (default: 0)"),
    ("--seed", int, "N", "seed of the draws (default: a fresh one for each answer)"),
    ("--logprobs", int, "K", "with --json: log-probabilities of each token and the K best"),
    ("--prompt-logprobs", int, "K", "with --json: the same for the prompt's tokens"),
    ("--logprobs-mode", str, "MODE", "raw or processed (default: raw)"),
    ("--truncate-prompt-tokens", int, "K", "keep the prompt's last K tokens (default: all)"),
    ("--loops", int, "S", "loops of generated tokens (default: the model's)"),
    ("--prefill-loops", int, "P", "loops of prompt tokens but the last (default: S)"),
    ("--exit-at-step", int, "K", "stop generated tokens after loop K, from 0"),
    ("--exit-threshold", float, "X", "of the exit gate or --exit-criterion (default: all loops)"),
    ("--exit-criterion", str, "NAME", "entropy-diff, latent-diff, kl or argmax-stability"),
    ("--exit-mode", str, "MODE", "sums of the exit gate: float32 or reference"),
    ("--exit-kv", str, "KV", "of early tokens: last_exited or run_all (default: last_exited)"),
    ("--noise-seed", int, "N", "seed of the random initial state (default: 0)"),
    ("--cache-salt", str, "TEXT", "share cached pages only under the same salt"),
    ("--priority", int, "N", "higher runs first (default: 0)"),
)
_SAMPLING_LISTS = (
    ("--stop", str, "TEXT", "ends an answer; repeatable"),
    ("--stop-token-ids", int, "ID", "token that ends an answer; repeatable"),
    ("--bad-words", str, "TEXT", "never comes in an answer; repeatable"),
)
_SAMPLING_SWITCHES = (
    ("--ignore-eos", "go on after the tokens that end an answer"),
    ("--include-stop", "print what ended an answer"),
    ("--skip-special-tokens", "leave special tokens out (default: yes)"),
    ("--exclude-input", "leave the prompt out of the answer (default: yes)"),
)


def main(argv: list[str] | None = None) -> int:
    """Run `looptrt`; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["build"]:
        prog = "looptrt build"
        return _guard(prog, arguments, lambda: _build(arguments[1:], prog))
    return _guard("looptrt", arguments, lambda: _run(arguments))


def trtllm_build(argv: list[str] | None = None) -> int:
    """Run `trtllm-build`; returns the exit code."""
    arguments, prog = sys.argv[1:] if argv is None else argv, "trtllm-build"

    def run() -> int:
        code = _hand_over(arguments)
        return _build(arguments, prog) if code is None else code

    return _guard(prog, arguments, run)


# ---- errors, streams and signals


def _guard(prog: str, arguments: list[str], run: Callable[[], int]) -> int:
    """Turn whatever a command raises into an exit code."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # answers can hold what a terminal cannot show
    try:
        _check_encoding(arguments)
        return _flushed(run)
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except (LooptrtError, OSError) as error:
        _drop_output()
        with contextlib.suppress(OSError):  # there may be no one to tell
            print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT


def _flushed(run: Callable[[], int]) -> int:
    try:
        return run()
    finally:
        sys.stdout.flush()


def _drop_output() -> None:
    """Let Python's flush at exit go nowhere if what is left cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _ClosedOutput(io.TextIOWrapper):
    """A standard output that its caller closed: using it is an error, having it is not."""

    def write(self, _text: str) -> int:
        raise OSError("the standard output is closed")


def _open_closed_streams() -> None:
    """Stand in for streams that are closed; else the next file opened would take their place."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = _ClosedOutput(io.BytesIO(), encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8")


def _check_encoding(arguments: Sequence[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise LooptrtError(f"{os.fsencode(argument)!r}: expected UTF-8") from None


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does, so that it cleans up."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        for name in before:
            signal.signal(name, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {
        number: handler
        for number in (signal.SIGTERM, signal.SIGHUP)
        if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
    }
    if threading.current_thread() is not threading.main_thread():
        before.clear()  # only the main thread may set handlers
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _logging(level: int) -> Iterator[None]:
    """Show messages of ours from `level` on, until the command ends."""
    root, ours = logging.getLogger(), logging.getLogger("looptrt")
    handlers, level_before = [*root.handlers], ours.level
    logging.basicConfig(format="%(levelname)s %(message)s")
    ours.setLevel(level)
    try:
        yield
    finally:
        ours.setLevel(level_before)
        root.handlers[:] = handlers


# ---- the commands


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are errors of ours, so that they end in one line."""

    def error(self, message: str) -> NoReturn:
        raise LooptrtError(f"{message}; see {self.prog} --help")


def _run(arguments: list[str]) -> int:
    args = _make_parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = args.command
    return command(args)


def _hand_over(arguments: list[str]) -> int | None:
    """TensorRT-LLM's exit code for an architecture that is not ours, None for one that is."""
    from looptrt.builder import handover  # noqa: PLC0415 - see _build

    if handover.foreign_architecture(arguments) is None:
        return None
    with _ended_by_signals():
        return handover.hand_over(arguments)


def _build(arguments: list[str], prog: str) -> int:
    # The builder loads torch and ONNX: seconds that no other command should pay.
    from looptrt.builder import build, flags  # noqa: PLC0415

    command = flags.read_command(arguments, prog)
    with _logging(command.log_level), _ended_by_signals():
        if command.dry_run:
            sys.stdout.write(build.plan_build(command.config).describe())
        else:
            build.build(command.config)
        if command.monitor_memory:
            peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            _logger.info("peak memory of the build: %d MiB", peak_kib // 1024)
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="looptrt",
        description="Compile looped language models and run them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"looptrt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    commands.add_parser("build", help="checkpoint to engine directory (see looptrt build --help)")
    _add_convert(commands.add_parser("convert", help="checkpoint to the other layout's names"))
    _add_verify(commands.add_parser("verify", help="checkpoint against the reference's logits"))
    _add_generate(commands.add_parser("generate", help="answer prompts", allow_abbrev=False))
    _add_inspect(commands.add_parser("inspect", help="describe an engine directory"))
    diagnosis = commands.add_parser("doctor", help="what is installed, which backends work here")
    diagnosis.add_argument("--json", action="store_true", help="print JSON")
    diagnosis.set_defaults(command=_doctor)
    return parser


# ---- convert and verify


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a checkpoint under TensorRT-LLM's names, or one under those back under Hugging "
        "Face's. Every tensor keeps its bits unless --dtype is given."
    )
    parser.set_defaults(command=_convert)
    parser.add_argument("--checkpoint_dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--to", choices=("hf", "trtllm"), help="(default: the other one)")
    parser.add_argument("--dtype", metavar="{float32,bfloat16}", help="cast the model's tensors")


def _convert(args: argparse.Namespace) -> int:
    from looptrt.builder.convert import convert  # noqa: PLC0415 - see _build

    with _logging(logging.INFO), _ended_by_signals():
        convert(args.checkpoint_dir, args.output_dir, args.to, args.dtype)
    return 0


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare our logits of a Hugging Face checkpoint with those of this Python's own "
        "Transformers, in float32 and in the checkpoint's dtype. Exit code 1: they differ by "
        "more than rounding."
    )
    parser.set_defaults(command=_verify)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument("--reference", choices=("hf",), required=True)
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the checkpoint's modelling code"
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompts", type=int, default=3, metavar="N", help="random prompts (default: 3)"
    )
    prompts.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="repeatable")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="X",
        help="float32 difference that passes, in parts of the largest logit (default: 0.001)",
    )


def _verify(args: argparse.Namespace) -> int:
    from looptrt.builder.compare import verify_checkpoint  # noqa: PLC0415 - see _build

    with _logging(logging.WARNING):
        rows = verify_checkpoint(
            args.checkpoint,
            texts=args.prompt,
            num_prompts=args.prompts,
            tolerance=args.tolerance,
            trust_remote_code=args.trust_remote_code,
        )
    headings = ("prompt", "dtype", "positions", "max diff", "allowed", "same top-1", "first beyond")
    table = Table(*headings, title="Our logits against the float32 reference's")
    for row in rows:
        table.add_row(
            row.prompt,
            row.dtype,
            str(row.num_positions),
            f"{row.max_diff:.3g}",
            f"{row.allowed:.3g}",
            f"{row.num_same_top1} of {row.num_positions}",
            "none" if row.passes else f"position {row.first_beyond}",
        )
    _console().print(table)
    return 0 if all(row.passes for row in rows) else DIFFERS


# ---- generate


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer prompts: those of --prompt and --prompts-file, else one a line of the standard "
        "input. Answers go to stdout, a line of figures for each to stderr. The exit code is 1 "
        "when an answer ended in an error."
    )
    parser.set_defaults(command=_generate)
    parser.add_argument("engine_dir", type=Path, metavar="ENGINE_DIR")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="repeatable")
    parser.add_argument("--prompts-file", type=Path, metavar="FILE", help="one prompt a line")
    for flag, kind, metavar, text in _SAMPLING_FLAGS:
        parser.add_argument(flag, type=kind, metavar=metavar, help=text)
    for flag, kind, metavar, text in _SAMPLING_LISTS:
        parser.add_argument(flag, type=kind, action="append", metavar=metavar, help=text)
    for flag, text in _SAMPLING_SWITCHES:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    parser.add_argument(
        "--embedding-bias", type=Path, metavar="FILE", help=".npy with a number for each token"
    )
    parser.add_argument("--chat", action="store_true", help="take each prompt as a user's message")
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print text as it comes (default: yes)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each answer")
    parser.add_argument("--in-process", action="store_true", help="run the engine in this process")
    parser.add_argument(
        "--kv-cache-bytes",
        type=_bytes,
        metavar="SIZE",
        help="KV memory (default: enough for the engine's limits, but at most 1GiB)",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="least severe message shown (default: %(default)s)",
    )


def _generate(args: argparse.Namespace) -> int:
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    params, prompts = _sampling_params(args), _prompts(args)
    config = EngineConfig(kv_cache_bytes=args.kv_cache_bytes)
    exit_code = 0
    with LLM(args.engine_dir, config, in_process=args.in_process) as llm:
        encoded: list[str | list[int]] = [*prompts]
        if args.chat:
            encoded = [llm.chat_prompt([{"role": "user", "content": text}]) for text in prompts]
        is_streaming = args.stream and not args.json and params.n == 1
        answer = _stream if is_streaming else _answer_all
        for index, output in enumerate(answer(llm, encoded, params)):
            for completion in output.outputs:
                if args.json:
                    answered = _as_json(output, completion, prompts[index])
                    print(json.dumps(answered, ensure_ascii=False))
                elif not is_streaming:
                    print(completion.text)
                sys.stdout.flush()
                print(_figures(index, len(prompts), output, completion), file=sys.stderr)
                if completion.finish_reason is FinishReason.ERROR:
                    exit_code = ANSWER_FAILED
    return exit_code


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    flags = [flag for flag, *_ in (*_SAMPLING_FLAGS, *_SAMPLING_LISTS, *_SAMPLING_SWITCHES)]
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.embedding_bias is not None:
        given["embedding_bias"] = _numbers(args.embedding_bias)
    return SamplingParams(**given)


def _numbers(path: Path) -> np.ndarray:
    """The array of a .npy file; pickles are refused."""
    try:
        array: np.ndarray = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise LooptrtError(f"{path}: not a .npy file of numbers: {error}") from None
    return array


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.prompts_file is not None:
        prompts += _lines(str(args.prompts_file), args.prompts_file.read_bytes())
    elif not prompts:
        if sys.stdin.isatty():
            raise LooptrtError("generate: give --prompt, --prompts-file or prompts on the input")
        prompts = _lines("the standard input", sys.stdin.buffer.read())
    if not prompts:
        raise LooptrtError("generate: there is no prompt")
    return prompts


def _lines(where: str, data: bytes) -> list[str]:
    """Prompts of a file: its lines that are not blank."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise LooptrtError(f"{where}: not UTF-8 text: {error}") from None
    return [line.rstrip("\r") for line in text.split("\n") if line.strip()]


def _answer_all(
    llm: LLM, prompts: list[str | list[int]], params: SamplingParams
) -> list[RequestOutput]:
    return llm.generate(prompts, params)


def _stream(
    llm: LLM, prompts: list[str | list[int]], params: SamplingParams
) -> Iterator[RequestOutput]:
    """Print answers in the order of their prompts, each as it comes, while later ones run."""
    waiting = deque(prompts)
    streams: deque[AnswerStream] = deque()
    while waiting or streams:
        while waiting and len(streams) < _STREAMS_AHEAD:
            streams.append(llm.stream(waiting.popleft(), params))
        for output in streams.popleft():
            print(output.outputs[0].delta, end="", flush=True)
        print(flush=True)
        yield output


def _as_json(output: RequestOutput, completion: CompletionOutput, prompt: str) -> dict[str, Any]:
    metrics = output.metrics
    assert metrics is not None
    scored = {
        "logprobs": completion.logprobs,
        "prompt_logprobs": output.prompt_logprobs,
    }
    return {
        "prompt": prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "depths": completion.depths,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_cached_tokens": output.num_cached_tokens,
        "kv_bytes": output.kv_bytes,
        "num_preemptions": metrics.num_preemptions,
        "ttft_s": metrics.ttft_s,
        "e2e_s": metrics.e2e_s,
        **{
            name: [None if at is None else dataclasses.asdict(at) for at in entries]
            for name, entries in scored.items()
            if entries is not None
        },
    }


def _figures(index: int, total: int, output: RequestOutput, completion: CompletionOutput) -> str:
    assert output.metrics is not None
    assert output.kv_bytes is not None
    depths = sorted(set(completion.depths))
    depth = "no token" if not depths else "-".join(map(str, dict.fromkeys((depths[0], depths[-1]))))
    num_tokens, seconds = completion.num_tokens, output.metrics.e2e_s
    has_failed = completion.finish_reason is FinishReason.ERROR
    return (
        f"[{index + 1}/{total}] depth {depth} | {num_tokens} tokens in {seconds:.2f} s "
        f"({num_tokens / max(seconds, 1e-9):.1f} tokens/s) | {output.num_cached_tokens} of "
        f"{len(output.prompt_token_ids)} prompt tokens cached | KV {_size(output.kv_bytes)} | "
        f"{completion.finish_reason}" + (f": {completion.stop_reason}" if has_failed else "")
    )


# ---- inspect


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.description = "Describe an engine directory: phases, KV units, what a memory can hold."
    parser.set_defaults(command=_inspect)
    parser.add_argument("engine_dir", type=Path, metavar="ENGINE_DIR")
    parser.add_argument(
        "--memory", type=_bytes, default="8GiB", metavar="SIZE", help="KV memory (default: 8GiB)"
    )
    parser.add_argument("--loops", type=int, metavar="S", help="loops of generated tokens")
    parser.add_argument("--prefill-loops", type=int, metavar="P", help="loops of prompt tokens")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _inspect(args: argparse.Namespace) -> int:
    manifest = Manifest.load(args.engine_dir)
    max_loops = manifest.layout.max_loops
    loops = min(manifest.spec.num_loops, max_loops) if args.loops is None else args.loops
    prefill_loops = loops if args.prefill_loops is None else args.prefill_loops
    if not 1 <= prefill_loops <= loops <= max_loops:
        raise LooptrtError(
            f"inspect: expected 1 <= --prefill-loops <= --loops <= {max_loops}, "
            f"got {prefill_loops} and {loops}"
        )
    report = _report(manifest, args.memory, loops, prefill_loops)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(manifest, report)
    return 0


def _report(manifest: Manifest, memory: int, loops: int, prefill_loops: int) -> dict[str, Any]:
    layout = manifest.layout
    null_unit = 1
    num_units = max(memory // layout.unit_bytes - null_unit, 0)
    return {
        "architecture": manifest.spec.architecture,
        "backend": manifest.backend,
        "dtype": manifest.dtype,
        "logits_dtype": manifest.logits_dtype,
        "fingerprint": manifest.fingerprint,
        "limits": dataclasses.asdict(manifest.limits),
        "end_tokens": {"ids": list(manifest.tokens.eos), "source": manifest.tokens.source},
        "phases": {name: dataclasses.asdict(phase) for name, phase in manifest.phases.items()},
        "kv": {
            "strategy": layout.strategy.name,
            "page_tokens": layout.page_size,
            "max_loops": layout.max_loops,
            "unit_shape": list(layout.unit_shape),
            "unit_bytes": layout.unit_bytes,
            "boundary_rows": layout.boundary_units,
            "plane_rows": layout.num_planes,
        },
        "memory": {
            "bytes": memory,
            "units": num_units,
            "prompt": _per_token(manifest, num_units, prefill_loops),
            "generated": _per_token(manifest, num_units, loops),
        },
    }


def _per_token(manifest: Manifest, num_units: int, depth: int) -> dict[str, int]:
    layout, spec = manifest.layout, manifest.spec
    all_layers = spec.prelude_layers + spec.core_layers + spec.coda_layers
    return {
        "loops": depth,
        "bytes_per_token": layout.bytes_per_token(depth),
        "bytes_per_token_all_layers": all_layers * depth * layout.slot_bytes_per_token,
        "capacity_tokens": num_units // layout.units_of_page(depth) * layout.page_size,
    }


def _print_report(manifest: Manifest, report: dict[str, Any]) -> None:
    console = _console()
    console.print(
        f"{report['architecture']}, {report['backend']} backend, {report['dtype']} "
        f"(logits {report['logits_dtype']}), built by looptrt {manifest.version}"
    )
    phases = Table("phase", "inputs", "outputs", "files", title="Phases")
    for name, phase in manifest.phases.items():
        files = ", ".join(file for file in (phase.onnx, phase.engine) if file is not None)
        phases.add_row(name, ", ".join(phase.inputs), ", ".join(phase.outputs), files)
    console.print(phases, _kv_table(report), _memory_table(report))


def _kv_table(report: dict[str, Any]) -> Table:
    kv, limits = report["kv"], report["limits"]
    table = Table("", "", title="KV and limits", show_header=False)
    table.add_row("unit [slots, K/V, tokens, heads, dim]", " × ".join(map(str, kv["unit_shape"])))
    table.add_row("bytes of a unit", f"{kv['unit_bytes']} ({_size(kv['unit_bytes'])})")
    rows = kv["boundary_rows"] + kv["plane_rows"]
    table.add_row(
        "rows of the block table",
        f"{rows}: {kv['boundary_rows']} boundary, {kv['plane_rows']} planes ({kv['strategy']})",
    )
    table.add_row("deepest loop count", str(kv["max_loops"]))
    for name, value in limits.items():
        table.add_row(name, str(value))
    table.add_row("ids that end an answer", f"{report['end_tokens']['ids']}")
    return table


def _memory_table(report: dict[str, Any]) -> Table:
    memory = report["memory"]
    title = f"{_size(memory['bytes'])} of KV memory: {memory['units']} units"
    table = Table("tokens", "loops", "bytes a token", "all layers at each loop", "fit", title=title)
    for kind in ("prompt", "generated"):
        row = memory[kind]
        ratio = row["bytes_per_token_all_layers"] / row["bytes_per_token"]
        table.add_row(
            kind,
            str(row["loops"]),
            str(row["bytes_per_token"]),
            f"{row['bytes_per_token_all_layers']} ({ratio:.2f} ×)",
            str(row["capacity_tokens"]),
        )
    return table


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b)?", text.strip().lower())
    unit = _BYTES.get(match[2] or "b") if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 8GiB or 500MB, got {text!r:.40}")
    num_bytes = float(match[1]) * unit
    if num_bytes > _MOST_MEMORY:
        raise argparse.ArgumentTypeError(
            f"expected at most {_size(_MOST_MEMORY)}, got {text!r:.40}"
        )
    return int(num_bytes)


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} bytes"


def _console() -> Console:
    return Console(markup=False, emoji=False, highlight=False)  # names are shown as they are


# ---- doctor


def _doctor(args: argparse.Namespace) -> int:
    findings = doctor.installed()
    backends = doctor.backends(findings)
    if args.json:
        sections = {"installed": findings, "backends": backends}
        as_json = {name: [dataclasses.asdict(f) for f in part] for name, part in sections.items()}
        print(json.dumps({"looptrt": __version__, **as_json}, indent=2))
        return 0
    console = _console()
    console.print(f"looptrt {__version__}")
    for title, part in (("Installed", findings), ("Backends", backends)):
        table = Table("", "", title=title, show_header=False)
        for finding in part:
            table.add_row(finding.name, finding.found or f"no: {finding.reason}")
        console.print(table)
    return 0
