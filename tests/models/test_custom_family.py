"""examples/custom_family: an architecture no table knows, from a file and from a package."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from looptrt.builder.build import BuildConfig, build, plan_build
from looptrt.cli import trtllm_build as main
from looptrt.errors import CheckpointError
from looptrt.models import registry
from looptrt.models.registry import ENTRY_POINT_GROUP, family_of, load_family_file
from tests.support.engines import Harness

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_family"
FAMILY_FILE = EXAMPLE / "echo_family.py"
ECHO = "EchoForCausalLM"
MAKER = runpy.run_path(str(EXAMPLE / "make_checkpoint.py"))
PROMPT = [(5 * i * i + 1) % 256 for i in range(19)]


@pytest.fixture(autouse=True)
def forget_files() -> Iterator[None]:
    """Families from files last as long as a process; here as long as a test."""
    yield
    registry._from_files.clear()


def checkpoint(path: Path) -> Path:
    return MAKER["write"](path)


def plain_echo(config: dict[str, Any], w: dict[str, Tensor], token_ids: list[int]) -> Tensor:
    """Logits of every position, all turns, no cache."""
    dim = config["width"] // config["query_heads"]

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], w[name], config["epsilon"])

    def rotate(x: Tensor) -> Tensor:
        rate = config["rotation_base"] ** -(torch.arange(0, dim, 2) / dim)
        rate = rate / config["rotation_stretch"]
        turn = torch.polar(torch.ones(1), torch.outer(torch.arange(x.shape[1]), rate))
        pairs = torch.view_as_complex(x.unflatten(-1, (2, -1)).mT.contiguous()) * turn
        return torch.view_as_real(pairs).mT.flatten(-2)

    def layer(x: Tensor, name: str) -> Tensor:
        look = norm(x, f"{name}.look.norm")
        q, k, v = (
            linear(look, w[f"{name}.look.{part}"]).unflatten(-1, (-1, dim)).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        seen = scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=True
        )
        x = x + linear(seen.transpose(0, 1).flatten(1), w[f"{name}.look.out"])
        think = norm(x, f"{name}.think.norm")
        gate, up = (linear(think, w[f"{name}.think.{part}"]) for part in ("gate", "up"))
        return x + linear(silu(gate) * up, w[f"{name}.think.down"])

    x = layer(w["words"][token_ids], "stem.0")
    for _ in range(config["turns"]):
        for i in range(config["ring_layers"]):
            x = layer(x, f"ring.{i}")
    return linear(norm(layer(x, "crown.0"), "last_norm"), w["words"])


def assert_engine_is_echo(engine_dir: Path) -> None:
    harness = Harness(engine_dir, max_num_tokens=8, max_batch_size=2)
    harness.add(PROMPT, 6)
    harness.drain()
    answer = harness.answers[0]
    token_ids = [*PROMPT, *answer.token_ids]
    want = plain_echo(MAKER["CONFIG"], MAKER["tensors"](MAKER["CONFIG"]), token_ids)
    got = torch.stack(answer.logits)
    torch.testing.assert_close(got, want[len(PROMPT) - 1 : -1], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_family_from_a_file_builds_and_runs(tmp_path: Path, workers: int) -> None:
    family = load_family_file(FAMILY_FILE, "FAMILY")
    assert family_of(ECHO) is family
    build(BuildConfig(checkpoint(tmp_path / "c"), tmp_path / "e", workers=workers))
    registry._from_files.clear()
    assert_engine_is_echo(tmp_path / "e")


def test_the_flags_of_trtllm_build_name_the_file(tmp_path: Path) -> None:
    flags = {
        "--checkpoint_dir": checkpoint(tmp_path / "c"),
        "--output_dir": tmp_path / "e",
        "--model_cls_file": FAMILY_FILE,
        "--model_cls_name": "FAMILY",
        "--workers": 2,
        "--log_level": "warning",  # what tests start with: the level outlives the call
    }
    assert main([str(word) for pair in flags.items() for word in pair]) == 0
    registry._from_files.clear()
    assert_engine_is_echo(tmp_path / "e")


def test_an_engine_runs_in_a_process_that_never_saw_the_family(tmp_path: Path) -> None:
    load_family_file(FAMILY_FILE, "FAMILY")
    build(BuildConfig(checkpoint(tmp_path / "c"), tmp_path / "e"))
    program = (
        "import sys\n"
        "from looptrt import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    with LLM(sys.argv[1]) as llm:\n"
        "        out = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))\n"
        "        print(len(out[0].outputs[0].token_ids), 'echo_family' in sys.modules)\n"
    )
    script = tmp_path / "run.py"
    script.write_text(program)
    command = [sys.executable, str(script), str(tmp_path / "e")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["4", "False"]


def test_a_family_from_a_package_builds_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an installer would write from the example's pyproject.toml, on sys.path."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    points = project["entry-points"][ENTRY_POINT_GROUP]
    info = tmp_path / "site" / "looptrt_echo-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *lines, ""]))
    for place in (EXAMPLE, tmp_path / "site"):
        monkeypatch.syspath_prepend(str(place))
    assert family_of(ECHO).architecture == ECHO
    build(BuildConfig(checkpoint(tmp_path / "c"), tmp_path / "e", workers=2))
    assert_engine_is_echo(tmp_path / "e")


def test_without_file_or_package_the_architecture_is_unknown(tmp_path: Path) -> None:
    config = BuildConfig(checkpoint(tmp_path / "c"), tmp_path / "e")
    with pytest.raises(CheckpointError, match="'EchoForCausalLM' is unknown"):
        plan_build(config)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("FAMILY = 3", "FAMILY", "FAMILY: expected a Family, found 3"),
        ("", "FAMILY", "FAMILY: expected a Family, found None"),
        ("1 / 0", "FAMILY", r"cannot be loaded: ZeroDivisionError"),
        ("def", "FAMILY", r"cannot be loaded: SyntaxError"),
        ("raise SystemExit(3)", "FAMILY", r"cannot be loaded: SystemExit"),
        ("import no_such_module", "FAMILY", r"cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, name: str, message: str) -> None:
    path = tmp_path / "family.py"
    path.write_text(text)
    before = set(sys.modules)
    with pytest.raises(CheckpointError, match=rf"family\.py: {message}"):
        load_family_file(path, name)
    broken = "cannot be loaded" in message
    assert not broken or not any(m.startswith("looptrt_family") for m in set(sys.modules) - before)


@pytest.mark.parametrize("name", ["absent.py", "family.txt", "."])
def test_what_is_no_python_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "family.txt").write_text("FAMILY = 3")
    with pytest.raises(CheckpointError, match="expected a Python file"):
        load_family_file(tmp_path / name, "FAMILY")


def test_a_named_file_stands_before_the_tree(tmp_path: Path) -> None:
    """Naming a file is explicit; it may read a known architecture in its own way."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import replace\n"
        "from looptrt.models import ouro\n"
        "FAMILY = replace(ouro.FAMILY, ignored=('*',))\n"
    )
    assert load_family_file(path, "FAMILY").ignored == ("*",)
    assert family_of("OuroForCausalLM").ignored == ("*",)
