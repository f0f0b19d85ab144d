"""`looptrt verify ENGINE_DIR` without a GPU; tests/runtime/test_cuda_executor.py has one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from looptrt.builder.build import BuildConfig, build
from looptrt.cli import main
from looptrt.cli.verify_engine import JOINED, NOT_TESTED
from looptrt.plugins import probe_products, reference, unfused
from looptrt.plugins.probe import Verdict
from looptrt.plugins.probe_products import call_of
from looptrt.plugins.products import JoinedProduct
from looptrt.plugins.schema import Exactness
from looptrt.runtime import engine_checks
from looptrt.runtime.engine_checks import EngineReport
from tests.support.checkpoints import tiny_huginn

no_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built with CUDA")
CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("engine")
    tiny_huginn(root / "c", dtype=torch.bfloat16)
    build(BuildConfig(root / "c", root / "e", tokens_per_block=8))
    return root / "e"


def test_without_a_gpu_that_is_said_and_strict_is_not_content(
    engine_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(engine_dir), *CPU]) == 0
    shown = capsys.readouterr().out
    assert "NO GPU WAS TESTED: device cpu was asked for" in shown
    assert "holds" in shown
    assert main(["verify", str(engine_dir), *CPU, "--strict", "--json"]) == NOT_TESTED
    report = json.loads(capsys.readouterr().out)
    assert report["gpu"] == {}
    assert report["num_files"] > 3
    (check,) = report["checks"]
    assert (check["operator"], check["level"]) == ("packed_plane_attention", "tolerance")
    assert check["elements"] > 1000
    assert check["holds"]


def test_strict_ends_with_1_on_a_mismatch(
    engine_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Callable[..., torch.Tensor] = reference.packed_plane_attention

    def wrong(*operands: torch.Tensor, **attributes: Any) -> torch.Tensor:
        return 1.05 * right(*operands, **attributes)

    monkeypatch.setattr(unfused, "packed_plane_attention", wrong)
    assert main(["verify", str(engine_dir), *CPU]) == 0
    assert "FAILS" in capsys.readouterr().out
    assert main(["verify", str(engine_dir), *CPU, "--strict", "--json"]) == 1
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert check["mismatches"] > 0


def test_a_joined_product_that_differs_is_told_and_no_fault(
    engine_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine computes it apart; the GPU's part of the report is played."""
    sound, differs = (
        Verdict(call_of(product, "bfloat16"), Exactness.EQUALS_TORCH, "its parts", [1, 24])
        for product in (JoinedProduct(64, (64, 32, 32)), JoinedProduct(64, (96, 96)))
    )
    sound.count("none", 0, 4096)
    differs.count("bfloat16 [24, 64]", 5, 4608)
    gpu = {"gpu": "a GPU", "driver": "1", "torch": "2", "cuda": "13", "library": "0" * 64}
    report = EngineReport(5, gpu, "", [], [sound, differs])
    monkeypatch.setattr(engine_checks, "check_engine", lambda *_: report)
    assert main(["verify", str(engine_dir), "--strict"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert JOINED in shown
    assert "apart:" in shown
    assert "FAILS" not in shown
    assert main(["verify", str(engine_dir), "--strict", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["holds"] for row in told["joined_products"]] == [True, False]
    assert told["joined_products"][1]["shapes"] == "1..24 rows of 64 to 96 + 96"
    assert told["joined_products"][1]["operator"] == probe_products.JOINED == JOINED


def test_a_changed_file_ends_it(
    engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = shutil.copytree(engine_dir, tmp_path / "e")
    weights = damaged / "rank0.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert main(["verify", str(damaged)]) == 2
    assert "rank0.safetensors: expected SHA-256" in capsys.readouterr().err


@no_cuda
def test_a_gpu_that_was_asked_for_must_be_there(
    engine_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(engine_dir), "--device", "cuda"]) == 2
    assert "device cuda: torch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected ENGINE_DIR or --checkpoint"),
        (["there", "--checkpoint", "here"], "expected ENGINE_DIR or --checkpoint"),
        (["--checkpoint", "here"], "--checkpoint needs --reference hf"),
        (["there", "--device", "tpu"], "device: expected auto, cpu, cuda or cuda:N"),
        (["there"], "config.json: no such file"),
    ],
)
def test_wrong_arguments_end_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
