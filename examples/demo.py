"""The main job on the two trained tiny models: build, ask, compare.

    make demo

Builds engine directories with `trtllm-build`, asks several prompts at two depths through
`looptrt generate` (streaming) and through the Python API, then starts Triton Inference Server
and the OpenAI-compatible endpoint on one of them, asks the same prompts, and shows that all
answers agree.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tritonclient.utils import InferenceServerException

from looptrt import LLM, SamplingParams
from looptrt.runtime.triton.server_env import CONTAINER_WAY
from running_server import START_TIMEOUT_S, RunningServer, end_with_parent, running_server
from triton_client import Question, generate, stream_grpc

ROOT = Path(__file__).resolve().parent
OUT = ROOT.parent / "out"
BIN = Path(sys.executable).parent
HELDOUT = ROOT / "data" / "heldout_eval.jsonl"
MAX_TOKENS = 8
TIMEOUT_S = 60.0
INTERRUPTED = 130  # as shells have it

console = Console(highlight=False, width=120)


@dataclass(frozen=True)
class Model:
    """A trained checkpoint and the two depths to ask it at: loops, loops of the prompt."""

    name: str
    depths: tuple[tuple[int, int], tuple[int, int]]
    lesson: str


MODELS = (
    Model(
        "tiny-ouro",
        ((1, 1), (4, 2)),
        "One loop looks one fact up; four loops (two for the prompt) follow chains of facts.",
    ),
    Model(
        "tiny-huginn",
        ((2, 1), (4, 1)),
        "After k loops the answer is the k-th link of the chain: two loops stop half way.",
    ),
)


def samples() -> list[dict[str, str]]:
    """One held-out prompt for each number of hops."""
    rows = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    return [next(row for row in rows if row["hops"] == hops) for hops in (1, 2, 3, 4)]


@dataclass(frozen=True)
class Asked:
    """A prompt at a depth, and the Python API's answer."""

    prompt: str
    loops: int
    prefill_loops: int
    answer: str


def run(command: list[str]) -> str:
    """Run a command of the package, show its output as it comes, and return it.

    Raises:
        subprocess.CalledProcessError: it failed; has the output.
    """
    console.print("[bold]$ " + " ".join(command))
    output = ""
    process = subprocess.Popen(
        [BIN / command[0], *command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        assert process.stdout is not None
        while piece := process.stdout.read(1):
            output += piece
            console.out(piece, end="", highlight=False)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output)
    return output


def build(model: Model) -> Path:
    """Checkpoint to engine directory."""
    engine_dir = OUT / model.name
    run(
        [
            "trtllm-build",
            f"--checkpoint_dir={ROOT / model.name}",
            f"--output_dir={engine_dir}",
            "--max_batch_size=8",
            "--tokens_per_block=8",
            "--log_level=warning",
        ]
    )
    return engine_dir


def ask_streaming(
    engine_dir: Path, prompts: list[str], loops: int, prefill_loops: int
) -> list[str]:
    """The answers of `looptrt generate`, shown token by token."""
    command = ["looptrt", "generate", str(engine_dir), "--stream", "--max-tokens", str(MAX_TOKENS)]
    command += ["--loops", str(loops), "--prefill-loops", str(prefill_loops)]
    for prompt in prompts:
        command += ["--prompt", prompt]
    lines = run(command).splitlines()
    return [line for line in lines if not line.startswith("[")]  # figures: [1/4] depth ...


def show(model: Model) -> tuple[bool, list[Asked]]:
    """Build and question one model; returns whether all answers agree, and those of Python."""
    console.rule(f"[bold]{model.name}")
    engine_dir = build(model)
    console.print(f"\n{model.lesson}\n")
    rows = samples()
    prompts = [row["prompt"] for row in rows]
    agree = True
    asked = []
    table = Table("prompt", "right answer", "loops", "CLI", "Python", "cached tokens", "KV bytes")
    with LLM(engine_dir) as llm:
        for loops, prefill_loops in model.depths:
            params = SamplingParams(max_tokens=MAX_TOKENS, loops=loops, prefill_loops=prefill_loops)
            first = llm.generate(prompts, params)
            again = llm.generate(prompts, params)
            streamed = ask_streaming(engine_dir, prompts, loops, prefill_loops)
            for row, one, two, text in zip(rows, first, again, streamed, strict=True):
                answer = one.outputs[0]
                agree &= answer.text == two.outputs[0].text == text
                agree &= set(answer.depths) == {loops}
                asked.append(Asked(row["prompt"], loops, prefill_loops, answer.text))
                table.add_row(
                    row["prompt"],
                    row["answer"],
                    f"{loops}, prompt {prefill_loops}",
                    text,
                    answer.text,
                    f"{one.num_cached_tokens}, then {two.num_cached_tokens}",
                    f"{one.kv_bytes:,}",
                )
            table.add_section()
    console.print()
    console.print(table)
    return agree, asked


def serve(engine_dir: Path, asked: Sequence[Asked]) -> bool:
    """Ask the same through both servers; returns whether all answers agree."""
    console.rule("[bold]Triton Inference Server and the OpenAI-compatible endpoint")
    ways: dict[str, list[list[str]]] = {}  # pieces of each answer
    if has_triton():
        console.print(f"[bold]$ looptrt triton --engine_dir {engine_dir}")
        with running_server(engine_dir, OUT / "triton.log") as server:
            ways["HTTP generate"] = [list(over_http(server, one)) for one in asked]
            ways["gRPC stream"] = [list(over_grpc(server, one)) for one in asked]
    console.print(f"[bold]$ looptrt serve {engine_dir}")
    with endpoint(engine_dir) as url:
        ways["OpenAI"] = [[over_openai(url, engine_dir.name, one)] for one in asked]
    table = Table("prompt", "loops", "Python", *ways)
    agree = True
    for one, *answers in zip(asked, *ways.values(), strict=True):
        agree &= {"".join(pieces) for pieces in answers} == {one.answer}
        table.add_row(
            one.prompt,
            f"{one.loops}, prompt {one.prefill_loops}",
            one.answer,
            *map(" ".join, answers),
        )
    console.print()
    console.print(table)
    return agree


def has_triton() -> bool:
    """Install the server where it is missing; False where no interpreter fits its stub."""
    console.print("The server is installed once, into the user's cache directory.")
    try:
        run(["looptrt", "triton", "--install_server"])
    except subprocess.CalledProcessError as error:
        if CONTAINER_WAY not in error.output:
            raise
        return False
    return True


def over_http(server: RunningServer, one: Asked) -> Iterator[str]:
    """Pieces of the answer over HTTP: one."""
    question = Question(one.prompt, depth_of(one))
    for piece in generate(server.http, "ensemble", question, stream=False, timeout_s=TIMEOUT_S):
        yield piece.text


def over_grpc(server: RunningServer, one: Asked) -> Iterator[str]:
    """Pieces of the answer over a gRPC stream, as they come."""
    question = Question(one.prompt, depth_of(one))
    for piece in stream_grpc(server.grpc, "ensemble", question, stream=True, timeout_s=TIMEOUT_S):
        if piece.text:
            yield piece.text


def over_openai(url: str, model: str, one: Asked) -> str:
    """The answer of the completions endpoint."""
    body = {"model": model, "prompt": one.prompt, "temperature": 0, **depth_of(one)}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return str(json.load(response)["choices"][0]["text"])


def depth_of(one: Asked) -> dict[str, int]:
    """What both servers call the depth and the length of an answer."""
    return {"max_tokens": MAX_TOKENS, "loops": one.loops, "prefill_loops": one.prefill_loops}


@contextmanager
def endpoint(engine_dir: Path) -> Iterator[str]:
    """`looptrt serve` on a free port; yields its URL."""
    with (
        (OUT / "serve.log").open("wb") as log,
        subprocess.Popen(
            [BIN / "looptrt", "serve", engine_dir, "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=end_with_parent,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            give_up = threading.Timer(START_TIMEOUT_S, process.kill)
            give_up.start()
            line = process.stdout.readline()  # comes when it is ready; nothing if it has failed
            give_up.cancel()
            if not line:
                raise RuntimeError(f"looptrt serve has ended: see {log.name}")
            yield line.split()[-1]
        finally:
            process.terminate()
            try:
                process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> int:
    """Run the demo; 0 when every answer agreed."""
    console.print(
        "Looped models run one block of layers many times a token. Each prompt below is a list\n"
        "of facts (x=y;) and three letters to look up; chains of facts need more loops.\n"
    )
    try:
        agree = True
        for model in MODELS:
            is_same, asked = show(model)
            agree &= is_same
        agree &= serve(OUT / model.name, asked)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (
        subprocess.CalledProcessError,
        InferenceServerException,
        RuntimeError,
        OSError,
    ) as error:
        console.print(str(error), style="bold red", markup=False)
        return 1
    console.print(
        "\n[bold green]All answers agree: streamed, Python, cached and not, through both servers."
        if agree
        else "\n[bold red]Answers differ."
    )
    console.print(f"The engine directories stay in {OUT.name}/; try `looptrt inspect`.")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
