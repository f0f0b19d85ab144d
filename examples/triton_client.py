"""Asks a Triton server of looptrt: streaming gRPC, HTTP generate and generate_stream, infer.

    looptrt triton --engine_dir out/tiny-huginn        # in another terminal
    python examples/triton_client.py --stream --prompt "n=5;a=0;y=s;m=7;f=2;s=m;p=y;t=y;?mft>"
    python examples/triton_client.py --protocol http --loops 2 --prompt "n=5;m=7;f=2;?mfn>"

gRPC and infer are the public `tritonclient`; generate needs nothing but Python. `infer` is for
servers that were started with --no-decoupled_mode. Letting go of a stream cancels its request.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import queue
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

# The inputs of `ensemble` and `tensorrt_llm_bls` that have an option here: type and help.
FIELDS: Mapping[str, tuple[str, str]] = {
    "max_tokens": ("INT32", "new tokens at most"),
    "min_tokens": ("INT32", "new tokens before the answer may end"),
    "temperature": ("FP32", "0 is greedy"),
    "top_k": ("INT32", "keep the k most likely tokens"),
    "top_p": ("FP32", "keep the most likely tokens up to this probability"),
    "min_p": ("FP32", "drop tokens below this times the most likely one"),
    "repetition_penalty": ("FP32", "above 1 makes known tokens less likely"),
    "presence_penalty": ("FP32", "off the logits of the answer's tokens"),
    "frequency_penalty": ("FP32", "the same each time a token came"),
    "seed": ("UINT64", "of the draws"),
    "loops": ("INT32", "loops of generated tokens"),
    "prefill_loops": ("INT32", "loops of prompt tokens but the last"),
    "exit_threshold": ("FP32", "exit probability at which a token stops looping"),
    "cache_salt": ("BYTES", "share cached pages only under the same salt"),
    "priority": ("INT32", "higher runs first"),
    "stop_words": ("BYTES", "ends the answer; repeatable"),
    "bad_words": ("BYTES", "never comes; repeatable"),
}
REPEATABLE = ("stop_words", "bad_words")
_NUMPY_TYPES = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}
_GRACE_S = 5.0  # for the server's own word about a deadline


@dataclass(frozen=True)
class Question:
    """A prompt and values for FIELDS."""

    prompt: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """One response: the whole answer, or what is new in a stream.

    Attributes:
        finish_reason: None in all but the last response.
        loops: run to make each token of the piece.
    """

    text: str
    finish_reason: str | None
    loops: tuple[int, ...]


def stream_grpc(
    url: str, model: str, question: Question, *, stream: bool, timeout_s: float
) -> Iterator[Piece]:
    """Ask over a gRPC stream; closing the iterator cancels the request.

    Raises:
        InferenceServerException: the server refused or failed, or the time is over.
        TimeoutError: the server says nothing.
    """
    inbox: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
    end_s = time.monotonic() + timeout_s + _GRACE_S
    with tritonclient.grpc.InferenceServerClient(url) as client:
        client.start_stream(
            lambda result, error: inbox.put((result, error)), stream_timeout=timeout_s
        )
        try:
            inputs = _tensors(tritonclient.grpc, question, stream=stream)
            # With this option a final response without tensors comes, too, so that every
            # request visibly ends.
            try:
                client.async_stream_infer(model, inputs, enable_empty_final_response=True)
            except InferenceServerException:
                if inbox.empty():  # else the stream has said why it is no longer there
                    raise
            is_final = False
            while not is_final:
                try:
                    result, error = inbox.get(timeout=max(0.0, end_s - time.monotonic()))
                except queue.Empty:
                    raise TimeoutError(f"no response within {timeout_s:g} s") from None
                if error is not None:
                    raise error
                response = result.get_response()
                is_final = response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    yield _piece_of(result.as_numpy)
        finally:
            client.stop_stream(cancel_requests=True)


def infer_grpc(
    url: str, model: str, question: Question, *, stream: bool, timeout_s: float
) -> Iterator[Piece]:
    """Ask for one whole answer by gRPC's plain infer.

    Raises:
        InferenceServerException: the server refused or failed, or the time is over.
    """
    with tritonclient.grpc.InferenceServerClient(url) as client:
        inputs = _tensors(tritonclient.grpc, question, stream=stream)
        yield _piece_of(client.infer(model, inputs, client_timeout=timeout_s).as_numpy)


def infer_http(
    url: str, model: str, question: Question, *, stream: bool, timeout_s: float
) -> Iterator[Piece]:
    """Ask for one whole answer by HTTP's infer; see `infer_grpc`."""
    client = tritonclient.http.InferenceServerClient(url, network_timeout=timeout_s)
    with client:
        inputs = _tensors(tritonclient.http, question, stream=stream)
        yield _piece_of(client.infer(model, inputs).as_numpy)


def generate(
    url: str, model: str, question: Question, *, stream: bool, timeout_s: float
) -> Iterator[Piece]:
    """Ask by HTTP's generate or generate_stream; closing the iterator cancels the request.

    Raises:
        InferenceServerException: the server refused or failed.
        OSError: there is no such server, or it says nothing until the time is over.
    """
    end_s = time.monotonic() + timeout_s
    body = json.dumps({"text_input": question.prompt, "stream": stream, **question.fields})
    verb = "generate_stream" if stream else "generate"
    with contextlib.closing(http.client.HTTPConnection(url, timeout=timeout_s)) as connection:
        connection.connect()
        sock = connection.sock
        connection.request("POST", f"/v2/models/{model}/{verb}", body)
        with connection.getresponse() as response:
            while line := response.readline():
                event = line.decode().removeprefix("data: ").strip()
                if event:
                    yield _piece_of_json(event, response.status)
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"not done within {timeout_s:g} s")
                sock.settimeout(left_s)


Way = Callable[..., Iterator[Piece]]
WAYS: Mapping[str, Way] = {
    "grpc": stream_grpc,
    "grpc-infer": infer_grpc,
    "http": generate,
    "http-infer": infer_http,
}


def _tensors(module: ModuleType, question: Question, *, stream: bool) -> list[Any]:
    """The inputs of a text model, each with the batch dimension of 1 in front."""
    values = [("text_input", "BYTES", np.array([[question.prompt.encode()]], object))]
    values.append(("stream", "BOOL", np.array([[stream]])))
    for name, value in question.fields.items():
        dtype, _ = FIELDS[name]
        several = value if name in REPEATABLE else [value]
        if dtype == "BYTES":
            array = np.array([[text.encode() for text in several]], object)
        else:
            array = np.array([several], _NUMPY_TYPES[dtype])
        values.append((name, dtype, array))
    inputs = []
    for name, dtype, array in values:
        tensor = module.InferInput(name, list(array.shape), dtype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def _piece_of(tensor: Callable[[str], np.ndarray | None]) -> Piece:
    text, reason, loops = map(tensor, ("text_output", "finish_reason", "loops_used"))
    return Piece(
        "" if text is None else text.flat[0].decode(),
        None if reason is None else reason.flat[0].decode(),
        () if loops is None else tuple(loops.reshape(-1).tolist()),
    )


def _piece_of_json(event: str, status: int) -> Piece:
    try:
        values = json.loads(event)
    except ValueError:
        raise InferenceServerException(f"unexpected answer: {event[:200]}", str(status)) from None
    if "error" in values:
        raise InferenceServerException(values["error"], str(status))
    loops = values.get("loops_used", [])
    loops = loops if isinstance(loops, list) else [loops]  # one element comes without its list
    return Piece(values["text_output"], values.get("finish_reason"), tuple(loops))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--url", default="127.0.0.1:8001", help="of gRPC (default: %(default)s)")
    parser.add_argument(
        "--http_url", default="127.0.0.1:8000", help="of HTTP (default: %(default)s)"
    )
    parser.add_argument("--protocol", choices=tuple(WAYS), default="grpc")
    parser.add_argument("--model", choices=("ensemble", "tensorrt_llm_bls"), default="ensemble")
    parser.add_argument("--prompt", action="append", required=True, help="repeatable")
    parser.add_argument("--stream", action="store_true", help="print the answer as it comes")
    parser.add_argument(
        "--cancel_after", type=int, metavar="N", help="cancel each stream after N responses"
    )
    parser.add_argument("--timeout_s", type=float, default=60.0, help="(default: 60)")
    sampling = parser.add_argument_group("the answer")
    kinds = {"INT32": int, "UINT64": int, "FP32": float, "BYTES": str}
    for name, (dtype, text) in FIELDS.items():
        sampling.add_argument(
            f"--{name}",
            type=kinds[dtype],
            action="append" if name in REPEATABLE else "store",
            default=32 if name == "max_tokens" else None,
            help=text,
        )
    args = parser.parse_args(arguments)
    if args.stream and args.protocol.endswith("-infer"):
        parser.error(f"--protocol {args.protocol}: infer has one response; leave out --stream")
    if args.cancel_after is not None and (not args.stream or args.cancel_after < 1):
        parser.error("--cancel_after: expected a number above 0, with --stream")
    if args.timeout_s <= 0:
        parser.error(f"--timeout_s: expected a number above 0, got {args.timeout_s:g}")
    return args


def show(args: argparse.Namespace, question: Question) -> None:
    """Print one answer as it comes; figures go to the standard error stream."""
    url = args.url if args.protocol.startswith("grpc") else args.http_url
    start_s, first_s, depths, reason = time.monotonic(), None, [], "cancelled"
    answer = WAYS[args.protocol](
        url, args.model, question, stream=args.stream, timeout_s=args.timeout_s
    )
    with contextlib.closing(answer):
        try:
            for number, piece in enumerate(answer, 1):
                first_s = first_s or time.monotonic()
                print(piece.text, end="", flush=True)
                depths += piece.loops
                reason = piece.finish_reason or reason
                if number == args.cancel_after and piece.finish_reason is None:
                    break
        finally:
            if first_s is not None:
                print()
    figures = f"{len(depths)} tokens, {sum(depths)} loops, {reason}"
    if first_s is not None:
        end_s = time.monotonic()
        figures += f", first after {(first_s - start_s) * 1e3:.0f} ms, all in "
        figures += f"{(end_s - start_s) * 1e3:.0f} ms"
    print(f"[{figures}]", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask the prompts one after the other; 1 when one could not be answered."""
    args = parse(arguments)
    values = {name: getattr(args, name) for name in FIELDS}
    fields = {name: value for name, value in values.items() if value is not None}
    for prompt in args.prompt:
        try:
            show(args, Question(prompt, fields))
        except (InferenceServerException, http.client.HTTPException, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
