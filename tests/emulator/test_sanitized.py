"""The kernels under the address and undefined behaviour sanitizers, in children that preload one.

Operands are heap blocks of exactly their sizes: one byte read or written beside them ends the
child, and so does a vector at an address that is no multiple of its size.
"""

from __future__ import annotations

import os  # a child's environment
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator.build import Mutation, build, compiler, sanitizer_runtime
from tests.support.absent import absent
from tests.support.tensorrt import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

CHILD_TIMEOUT_S = 300.0


def run_tests(library: Path, file: str, chosen: str) -> subprocess.CompletedProcess[str]:
    """Tests of the fast tier whose names fit `chosen`, with a sanitized library."""
    runtime = sanitizer_runtime()
    if runtime is None:
        absent(f"the C++ compiler {compiler()} has no libasan.so")
    variables = {"LD_PRELOAD": str(runtime), "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.emulator.given_library"),
            *("--emulated-library", str(library), "-p", "no:cacheprovider", "-x", "-q", "-s"),
            *("-m", "not full", "-k", chosen, str(ROOT / "tests" / "emulator" / file)),
        ],
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=False,
        cwd=ROOT,
        env={**os.environ, **variables},  # noqa: TID251 - see the import
    )


@pytest.mark.parametrize(
    ("kernels", "file", "chosen"),
    [
        (
            "packed_plane_attention",
            "test_emulated_attention.py",
            "near_float64 or places or null or table or range",
        ),
        (
            "skinny_linear",
            "test_emulated_linear.py",
            "near_float64 and up-late or alone and down-early or no_bits or chain",
        ),
    ],
)
def test_no_kernel_leaves_its_operands(
    tmp_path: Path, kernels: str, file: str, chosen: str
) -> None:
    done = run_tests(build(tmp_path, (kernels,), level=0, sanitize=True), file, chosen)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def test_a_read_beside_a_weight_is_found(tmp_path: Path) -> None:
    """The last tile reads rows that the weight does not have; what comes of them is not stored."""
    tail = Mutation(
        "kernels/skinny_linear.cu",
        "bool const is_valid = input < inputs_ && output < outputs_;",
        "bool const is_valid = input < inputs_;",
    )
    library = build(tmp_path, ("skinny_linear",), mutation=tail, level=0, sanitize=True)
    done = run_tests(library, "test_emulated_linear.py", "near_float64 and up-late")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
