"""Options and marks shared by all tests: which need a GPU, and hypothesis's profile."""

from __future__ import annotations

import os  # the profile follows CI's own variable; children inherit the thread count

# Tensors are tiny: OpenMP's barriers cost more than they save, most of all on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # noqa: TID251 - before torch reads it

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")  # noqa: TID251 - see above


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail the GPU tests that would be skipped",
    )
    parser.addoption(
        "--tensorrt-include",
        metavar="DIR",
        help="headers of a TensorRT SDK, to compare our declarations with",
    )


def _gpus_needed(item: pytest.Item) -> int:
    if item.get_closest_marker("multi_gpu"):
        return 2
    return 1 if item.get_closest_marker("gpu") else 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed, found = _gpus_needed(item), torch.cuda.device_count()
    if found < needed:
        pytest.skip(f"needs {needed} GPU(s), found {found}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport:
    report: pytest.TestReport = yield
    is_xfail = hasattr(report, "wasxfail")
    if (
        report.skipped
        and not is_xfail
        and _gpus_needed(item)
        and item.config.getoption("--require-gpu")
    ):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"--require-gpu: a GPU test was skipped: {reason}"
    return report
