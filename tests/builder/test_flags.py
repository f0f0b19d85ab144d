"""Flags: TensorRT-LLM's names, one line and exit code 2 for what cannot be served."""

from __future__ import annotations

from pathlib import Path

import pytest

from looptrt.builder.build import BuildConfig
from looptrt.builder.flags import main, parse_config
from looptrt.errors import BuildError
from looptrt.loop_spec import NoiseMode
from tests.support.checkpoints import tiny_huginn, tiny_ouro


def parse(*argv: str) -> BuildConfig:
    return parse_config(["--checkpoint_dir", "c", *argv], "trtllm-build")[0]


def test_defaults() -> None:
    assert parse() == BuildConfig(Path("c"), Path("engine_outputs"))


def test_both_spellings_of_every_flag() -> None:
    values = {
        "--output_dir": "o",
        "--max_batch_size": "3",
        "--max_input_len": "4",
        "--max_seq_len": "5",
        "--max_num_tokens": "6",
        "--tokens_per_block": "7",
        "--max_loops": "8",
        "--workers": "9",
        "--kv_cache_type": "PAGED",
        "--logits_dtype": "bfloat16",
        "--backend": "pytorch",
        "--kv_planes": "compress-s8",
        "--noise": "sequential",
        "--dtype": "bfloat16",
        "--log_level": "verbose",
    }
    apart = [word for item in values.items() for word in item]
    joined = [f"{name}={value}" for name, value in values.items()]
    expected = BuildConfig(
        checkpoint_dir=Path("c"),
        output_dir=Path("o"),
        max_batch_size=3,
        max_input_len=4,
        max_seq_len=5,
        max_num_tokens=6,
        tokens_per_block=7,
        max_loops=8,
        kv_planes="compress-s8",
        noise=NoiseMode.SEQUENTIAL,
        dtype="bfloat16",
        logits_dtype="bfloat16",
        backend="pytorch",
        workers=9,
    )
    assert parse(*apart) == parse(*joined) == expected


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gemm_plugin", "auto"], "--gemm_plugin: matrix products"),
        (["--max_beam_width=4"], "--max_beam_width: beam search"),
        (["--no_such_flag"], "--no_such_flag: unknown flag"),
        (["--max_batch", "3"], "--max_batch: unknown flag"),
        (["stray"], "stray: unknown flag"),
        (["--kv_cache_type", "continuous"], "--kv_cache_type continuous: the KV"),
        (["--kv_cache_type=disabled"], "--kv_cache_type disabled: every loop"),
        (["--kv_cache_type=odd"], "--kv_cache_type odd: unknown kind"),
        (["--max_loops", "3.5"], "--max_loops: invalid int value: '3.5'"),
        (["--max_loops"], "--max_loops: expected one argument"),
        (["--noise", "loud"], "--noise: invalid"),
        (["--log_level", "loud"], "--log_level: invalid choice"),
    ],
)
def test_flags_that_cannot_be_read(argv: list[str], words: str) -> None:
    with pytest.raises(BuildError) as caught:
        parse(*argv)
    assert words in str(caught.value)


def test_checkpoint_dir_is_required() -> None:
    with pytest.raises(BuildError, match="--checkpoint_dir"):
        parse_config([], "trtllm-build")


COUNTS = (
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_num_tokens",
    "tokens_per_block",
    "max_loops",
    "workers",
)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        *(
            (f"--{name} {value}", f"--{name}: expected at least 1")
            for name in COUNTS
            for value in (0, -1)
        ),
        ("--max_seq_len 129", "--max_seq_len 129: the model defines 128 positions"),
        ("--max_seq_len 64 --max_input_len 65", "--max_input_len 65: expected at most"),
        ("--dtype float16", "--dtype float16: expected float32 or bfloat16"),
        ("--logits_dtype float16", "--logits_dtype float16"),
        ("--backend tensorrt", "--backend tensorrt: expected auto or pytorch"),
        ("--kv_planes full", "unknown strategy 'full'"),
        ("--kv_planes compress-s4", "multiple of the core's 3 layers"),
        ("--kv_planes compress-s0", "compress-s0"),
        ("--noise sequential", "--noise sequential: OuroForCausalLM has no random initial state"),
    ],
)
def test_limits_that_the_model_cannot_meet(
    tmp_path: Path, argv: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    output = tmp_path / "engine"
    argv = f"--checkpoint_dir {checkpoint} --output_dir {output} {argv}"
    assert main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trtllm-build: error: ")
    assert err.count("\n") == 1
    assert words in err
    assert not output.exists()


def test_max_input_len_defaults_to_what_the_model_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--checkpoint_dir", str(tiny_ouro(tmp_path / "c")), "--dry_run"]
    assert main([*argv, "--max_seq_len", "100"]) == 0
    assert "prompt 100, sequence 100" in capsys.readouterr().out


def test_dry_run_prints_the_plan_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny_huginn(tmp_path / "c")
    before = sorted(tmp_path.rglob("*"))
    argv = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "a" / "b")]
    assert main([*argv, "--dry_run", "--kv_planes", "compress-s8"]) == 0
    out = capsys.readouterr().out
    for fact in ("RavenForCausalLM", "2 prelude, 4 core, 2 coda", "2 (compress-s8)", "float32"):
        assert fact in out
    assert sorted(tmp_path.rglob("*")) == before


def test_dry_run_checks_the_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["--checkpoint_dir", str(checkpoint), "--dry_run"]) == 2
    assert "is cut" in capsys.readouterr().err


def test_output_directory_of_someone_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(tiny_ouro(tmp_path / "c"))
    assert main(["--checkpoint_dir", checkpoint, "--output_dir", checkpoint], "looptrt build") == 2
    assert capsys.readouterr().err.startswith("looptrt build: error: --output_dir")
