"""`looptrt verify`: our logits against a modelling file that Transformers runs (A8)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from looptrt.builder import compare as comparison
from looptrt.builder import hf_reference
from looptrt.builder.compare import compare, verify_checkpoint
from looptrt.builder.convert import convert
from looptrt.builder.dense_run import DenseModel
from looptrt.builder.hf_reference import check_rotary_tables
from looptrt.builder.source import open_checkpoint
from looptrt.cli import main
from looptrt.errors import BuildError
from looptrt.models.blocks import inverse_frequencies
from tests.support.checkpoints import (
    tiny_huginn,
    tiny_llama,
    tiny_olmo,
    tiny_ouro,
    with_remote_code,
    write_tokenizer,
)
from tests.support.oracle import DenseOracle

TOKENS = [(3 * index + 1) % 251 for index in range(23)]
MAKERS = {"ouro": tiny_ouro, "huginn": tiny_huginn, "olmo": tiny_olmo, "llama": tiny_llama}


# Our side.


@pytest.mark.parametrize("family", MAKERS)
def test_dense_run_equals_the_oracle(tmp_path: Path, family: str) -> None:
    directory = MAKERS[family](tmp_path / "c")
    source = open_checkpoint(directory)
    oracle = DenseOracle.from_checkpoint(directory)
    expected = oracle.logits(TOKENS, [source.spec.num_loops] * len(TOKENS))
    found = DenseModel(source, "float32", len(TOKENS)).logits(TOKENS)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


# The whole command, in a process: remote code goes to a cache of its own.

PROGRAM = [sys.executable, "-c", "import sys; from looptrt.cli import main; sys.exit(main())"]


def verify(checkpoint: Path, *flags: str, trusted: bool = True) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("transformers", reason="the reference is the user's Transformers")
    command = [*PROGRAM, "verify", "--checkpoint", str(checkpoint), "--reference", "hf", *flags]
    environment = {"HF_HOME": str(checkpoint.parent / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "--trust-remote-code"] if trusted else command,
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"COLUMNS": "200"},
    )


@pytest.mark.full
@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_reference_agrees_in_both_dtypes(tmp_path: Path, family: str) -> None:
    checkpoint = with_remote_code(MAKERS[family](tmp_path / "c", dtype=torch.bfloat16))
    result = verify(checkpoint, "--prompts", "2")
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if "random" in line]
    assert [row.split("│")[2].strip() for row in rows] == ["float32"] * 2 + ["bfloat16"] * 2
    assert all("none" in row for row in rows)


@pytest.mark.full
def test_reference_of_other_weights_is_found_out(tmp_path: Path) -> None:
    """A modelling file that reads one tensor otherwise: exit code 1 and the first position."""
    checkpoint = with_remote_code(tiny_ouro(tmp_path / "c"))
    write_tokenizer(checkpoint, {})
    code = checkpoint / "modeling_tiny_ouro.py"
    text = code.read_text()
    assert "x = self.model.norm(x)" in text
    code.write_text(text.replace("x = self.model.norm(x)", "x = self.model.norm(x) * 1.01"))
    result = verify(checkpoint, "--prompt", "t3 t4 t5")
    assert result.returncode == 1, result.stderr
    assert "'t3 t4 t5'" in result.stdout
    assert "position 0" in result.stdout


@pytest.mark.full
def test_zeroed_frequencies_are_refused(tmp_path: Path) -> None:
    """Case A8: a loader that forgets a table that is not in the file."""
    checkpoint = with_remote_code(tiny_ouro(tmp_path / "c"))
    code = checkpoint / "modeling_tiny_ouro.py"
    text = code.read_text()
    code.write_text(text.replace("leaves_tables_zeroed = False", "leaves_tables_zeroed = True"))
    result = verify(checkpoint)
    assert result.returncode == 2
    assert "model.rotary_emb.inv_freq: off by 1 of 1/theta^(2i/d)" in result.stderr


def test_code_that_is_not_trusted_is_not_run(tmp_path: Path) -> None:
    checkpoint = with_remote_code(tiny_ouro(tmp_path / "c"))
    (checkpoint / "modeling_tiny_ouro.py").write_text("raise SystemExit(9)")
    result = verify(checkpoint, trusted=False)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "say --trust-remote-code to have it run" in result.stderr


@pytest.mark.full
def test_model_that_transformers_does_not_know(tmp_path: Path) -> None:
    result = verify(tiny_ouro(tmp_path / "c"), trusted=False)
    assert result.returncode == 2
    assert "cannot load" in result.stderr.splitlines()[-1]


# Refusals that need no Transformers.


def refuse(checkpoint: Path, words: str, capsys: pytest.CaptureFixture[str], *flags: str) -> None:
    assert main(["verify", "--checkpoint", str(checkpoint), "--reference", "hf", *flags]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.splitlines()[-1].startswith("looptrt: error: ")


def test_missing_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finder = SimpleNamespace(find_spec=lambda _: None)
    monkeypatch.setattr(hf_reference, "importlib", SimpleNamespace(util=finder))
    refuse(tiny_ouro(tmp_path / "c"), "`pip install transformers`", capsys)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompts", "0"], "--prompts: expected at least 1"),
        (["--prompt", "t1"], "tokenizer.json: no such file"),
        (["--tolerance", "-1"], "--tolerance: expected a number of at least 0"),
        (["--tolerance", "nan"], "--tolerance: expected"),
        (["--prompts", "1", "--prompt", "t1"], "not allowed with"),
        (["--reference", "vllm"], "invalid choice"),
    ],
)
def test_arguments_that_cannot_be_served(
    tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(tiny_ouro(tmp_path / "c"), words, capsys, *flags)


@pytest.mark.parametrize("text", ["", "t1 " * 200])
def test_prompts_that_do_not_fit(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    write_tokenizer(checkpoint, {})
    refuse(checkpoint, "expected 1 to 128 tokens", capsys, "--prompt", text)


def test_trtllm_names_have_to_be_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(tiny_ouro(tmp_path / "c"), tmp_path / "there", None, None)
    refuse(tmp_path / "there", "looptrt convert --to hf", capsys)


def test_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    tensors = load_file(checkpoint / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, checkpoint / "model.safetensors")
    refuse(checkpoint, "'model.norm.weight': missing", capsys)


# Rotary tables (A8).


def with_buffer(name: str, table: Tensor) -> nn.Module:
    module = nn.Module()
    module.part = nn.Module()
    module.part.register_buffer(name, table)
    return module


def test_frequencies_equal_the_formula_in_float64(tmp_path: Path) -> None:
    spec = open_checkpoint(tiny_ouro(tmp_path / "c")).spec
    channels = torch.arange(0, spec.head_dim, 2, dtype=torch.float64)
    exact = 1 / spec.rope.base ** (channels / spec.head_dim)
    assert ((inverse_frequencies(spec).double() - exact) / exact).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda table: table * 0, "off by 1 of"),
        (lambda table: table.bfloat16(), "expected float32, found torch.bfloat16"),
        (lambda table: table.bfloat16().float(), "uninitialised or wrong"),
        (lambda table: table[:-1], "off by inf"),
        (lambda table: table + float("nan"), "off by nan"),
    ],
)
def test_bad_frequencies_are_refused(tmp_path: Path, damage: object, words: str) -> None:
    spec = open_checkpoint(tiny_ouro(tmp_path / "c")).spec
    table = inverse_frequencies(spec)
    check_rotary_tables(with_buffer("inv_freq", table), spec)
    with pytest.raises(BuildError, match=f"part.inv_freq: .*{words}"):
        check_rotary_tables(with_buffer("inv_freq", damage(table)), spec)  # type: ignore[operator]


def test_rounded_table_is_replaced_and_a_wrong_one_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tiny_huginn(tmp_path / "c")
    spec = open_checkpoint(directory).spec
    exact = load_file(directory / "model.safetensors")["freqs_cis"]
    sound = with_buffer("freqs_cis", exact)
    check_rotary_tables(sound, spec)
    assert sound.part.freqs_cis is exact
    assert not caplog.text
    rounded = with_buffer("freqs_cis", exact.bfloat16())
    check_rotary_tables(rounded, spec)
    assert "part.freqs_cis: off by 0.00195" in caplog.text
    assert rounded.part.freqs_cis.dtype == torch.float32
    assert (rounded.part.freqs_cis - exact).abs().max() < 1e-5
    with pytest.raises(BuildError, match=r"part\.freqs_cis: off by 1 "):
        check_rotary_tables(with_buffer("freqs_cis", exact * 0), spec)


# Verdicts.


def test_verdict_names_the_first_position_beyond() -> None:
    exact = torch.zeros(4, 3)
    exact[:, 1] = 10.0
    ours = exact.clone()
    ours[2, 0] += 0.02
    ours[3, 2] += 20.0
    row = compare("p", "float32", ours, exact, exact, tolerance=1e-3)
    assert (row.allowed, row.own_diff) == (pytest.approx(0.01), 0.0)
    assert (row.first_beyond, row.num_same_top1, row.max_diff) == (2, 3, 20.0)
    assert not row.passes
    assert compare("p", "float32", exact, exact, exact, tolerance=0).passes


def test_coarse_dtype_is_judged_by_the_references_own_error() -> None:
    exact, own, ours = torch.zeros(1, 2), torch.full((1, 2), 0.1), torch.full((1, 2), -0.15)
    assert compare("p", "bfloat16", ours, own, exact, tolerance=0).passes
    assert not compare("p", "bfloat16", ours * 2, own, exact, tolerance=0).passes
    assert not compare("p", "bfloat16", ours * float("nan"), own, exact, tolerance=0).passes


def test_one_reference_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32, then the declared dtype; and the reference is asked for all loops and no noise."""
    made = []

    class Reference:
        def __init__(self, source: object, dtype: str, *, trust_remote_code: bool) -> None:
            made.append((dtype, trust_remote_code))
            self._model = DenseModel(source, dtype, 33)  # type: ignore[arg-type]

        def logits(self, token_ids: tuple[int, ...]) -> Tensor:
            return self._model.logits(token_ids)

    monkeypatch.setattr(comparison, "HfReference", Reference)
    checkpoint = tiny_huginn(tmp_path / "c", dtype=torch.bfloat16)
    arguments = {"texts": [], "num_prompts": 4, "tolerance": 0.0, "trust_remote_code": False}
    rows = verify_checkpoint(checkpoint, **arguments)  # type: ignore[arg-type]
    assert made == [("float32", False), ("bfloat16", False)]
    assert [row.dtype for row in rows] == ["float32"] * 4 + ["bfloat16"] * 4
    assert all(row.max_diff == row.own_diff for row in rows)
    spec = open_checkpoint(checkpoint).spec
    expected = {"use_cache": False, "num_steps": 4, "init_scale": 0.0}
    assert hf_reference._arguments(spec) == expected
    spec = open_checkpoint(tiny_ouro(tmp_path / "o")).spec
    assert hf_reference._arguments(spec) == {"use_cache": False, "exit_at_step": 3}
