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
from rich.table import Table

from looptrt import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent
OUT = ROOT.parent / "out"
BIN = Path(sys.executable).parent
HELDOUT = ROOT / "data" / "heldout_eval.jsonl"

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


def run(command: list[str]) -> str:
    """Run a command of the package, show its output as it comes, and return it."""
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
        raise SystemExit(f"{command[0]} ended with exit code {process.returncode}")
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
    command = ["looptrt", "generate", str(engine_dir), "--stream", "--max-tokens", "8"]
    command += ["--loops", str(loops), "--prefill-loops", str(prefill_loops)]
    for prompt in prompts:
        command += ["--prompt", prompt]
    lines = run(command).splitlines()
    return [line for line in lines if not line.startswith("[")]  # figures: [1/4] depth ...


def show(model: Model) -> bool:
    """Build and question one model; returns whether all answers agree."""
    console.rule(f"[bold]{model.name}")
    engine_dir = build(model)
    console.print(f"\n{model.lesson}\n")
    rows = samples()
    prompts = [row["prompt"] for row in rows]
    agree = True
    table = Table("prompt", "right answer", "loops", "CLI", "Python", "cached tokens", "KV bytes")
    with LLM(engine_dir) as llm:
        for loops, prefill_loops in model.depths:
            params = SamplingParams(max_tokens=8, loops=loops, prefill_loops=prefill_loops)
            first = llm.generate(prompts, params)
            again = llm.generate(prompts, params)
            streamed = ask_streaming(engine_dir, prompts, loops, prefill_loops)
            for row, one, two, text in zip(rows, first, again, streamed, strict=True):
                answer = one.outputs[0]
                agree &= answer.text == two.outputs[0].text == text
                agree &= set(answer.depths) == {loops}
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
