"""The main job on the two trained tiny models: build, ask, compare.

    make demo

Builds engine directories with `trtllm-build`, asks several prompts at two depths through
`looptrt generate` (streaming) and through the Python API, and shows that both agree.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from looptrt import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent
OUT = ROOT.parent / "out"
BIN = Path(sys.executable).parent
HELDOUT = ROOT / "data" / "heldout_eval.jsonl"

console = Console(highlight=False, width=110)


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


def run(command: list[str], *, echo: bool) -> str:
    """Run a command of the package, show its output as it comes, and return it."""
    console.print("[bold]$ " + " ".join(command))
    output = ""
    with subprocess.Popen([BIN / command[0], *command[1:]], stdout=subprocess.PIPE, text=True) as p:
        assert p.stdout is not None
        while piece := p.stdout.read(1):
            output += piece
            if echo:
                console.out(piece, end="", highlight=False)
    if p.returncode:
        raise SystemExit(f"{command[0]} ended with exit code {p.returncode}")
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
        ],
        echo=True,
    )
    return engine_dir


def ask_streaming(engine_dir: Path, prompt: str, loops: int, prefill_loops: int) -> str:
    """The answer of `looptrt generate`, printed token by token."""
    command = ["looptrt", "generate", str(engine_dir), "--prompt", prompt, "--stream"]
    depth = ["--loops", str(loops), "--prefill-loops", str(prefill_loops), "--max-tokens", "8"]
    return run([*command, *depth], echo=True).strip()


def show(model: Model) -> bool:
    """Build and question one model; returns whether all answers agree."""
    console.rule(f"[bold]{model.name}")
    engine_dir = build(model)
    console.print(f"\n{model.lesson}\n")
    rows = samples()
    agree = True
    table = Table(
        "prompt", "right", "loops", "prompt loops", "CLI", "Python", "cached tokens", "KV bytes"
    )
    with LLM(engine_dir) as llm:
        for loops, prefill_loops in model.depths:
            params = SamplingParams(max_tokens=8, loops=loops, prefill_loops=prefill_loops)
            outputs = llm.generate([row["prompt"] for row in rows], params)
            again = llm.generate([row["prompt"] for row in rows], params)
            streamed = [
                ask_streaming(engine_dir, row["prompt"], loops, prefill_loops)
                for row in track(rows, description="asking", console=console, transient=True)
            ]
            for row, first, second, text in zip(rows, outputs, again, streamed, strict=True):
                answer = first.outputs[0].text
                agree &= answer == second.outputs[0].text == text
                table.add_row(
                    row["prompt"],
                    row["answer"],
                    str(max(first.outputs[0].depths)),
                    str(prefill_loops),
                    text,
                    answer,
                    f"{first.num_cached_tokens}, then {second.num_cached_tokens}",
                    f"{first.kv_bytes:,}",
                )
    console.print()
    console.print(table)
    return agree


def main() -> int:
    """Run the demo; 0 when every answer agreed."""
    console.print(
        "Looped models run one block of layers many times a token. Each prompt below is a list\n"
        "of facts (x=y;) and three letters to look up; chains of facts need more loops.\n"
    )
    agree = False not in [show(model) for model in MODELS]
    console.print(
        "\n[bold green]All answers agree: streamed, Python, cached and not."
        if agree
        else "\n[bold red]Answers differ."
    )
    console.print(f"The engine directories stay in {OUT.name}/; try `looptrt inspect`.")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
