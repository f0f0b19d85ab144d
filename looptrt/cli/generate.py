"""`looptrt generate`: prompts in, answers on the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from looptrt.cli.engine_options import add_engine_options, engine_config
from looptrt.cli.guard import ANSWER_FAILED
from looptrt.cli.terminal import Commands, size_text
from looptrt.errors import LooptrtError
from looptrt.runtime.llm import LLM, AnswerStream
from looptrt.runtime.outputs import CompletionOutput, RequestOutput
from looptrt.runtime.request import FinishReason
from looptrt.runtime.sampling_params import SamplingParams

_STREAMS_AHEAD = 64  # requests that run while earlier answers are printed

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


def add_parser(commands: Commands) -> None:
    """Declare `looptrt generate`."""
    parser = commands.add_parser("generate", help="answer prompts", allow_abbrev=False)
    parser.description = (
        "Answer prompts: those of --prompt and --prompts-file, else one a line of the standard "
        "input. Answers go to stdout, a line of figures for each to stderr. The exit code is 1 "
        "when an answer ended in an error."
    )
    parser.set_defaults(command=run)
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
    add_engine_options(parser)
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="least severe message shown (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    params, prompts = _sampling_params(args), _prompts(args)
    config = engine_config(args)
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
        f"{len(output.prompt_token_ids)} prompt tokens cached | KV {size_text(output.kv_bytes)} | "
        f"{completion.finish_reason}" + (f": {completion.stop_reason}" if has_failed else "")
    )
