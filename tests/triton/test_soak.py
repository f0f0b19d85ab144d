"""Mixed load on the real server: each request ends once, and nothing grows with their number."""

from __future__ import annotations

from pathlib import Path

import pytest

from looptrt.builder.build import BuildConfig, build
from triton_soak import SHM_LIMIT_BYTES, Report, Usage, growth, soak

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("soak") / "engine"
    checkpoint = EXAMPLES / "tiny-huginn"
    build(BuildConfig(checkpoint_dir=checkpoint, output_dir=directory, tokens_per_block=8))
    return directory


def check(report: Report, num_requests: int) -> None:
    assert report.faults == []
    assert sum(report.outcomes.values()) == num_requests
    assert {outcome.split(":")[0] for outcome in report.outcomes} == {
        *("grpc_text", "grpc_ids", "http", "log_probs", "refused", "cancelled", "dropped"),
    }
    assert all(usage.units_used == 0 for usage in report.usage)
    if report.shm_limit_bytes is not None:
        assert max(usage.shm_bytes for usage in report.usage) < SHM_LIMIT_BYTES


@pytest.mark.full
def test_300_mixed_requests_end_once_each_and_nothing_grows(
    server_env: None, engine_dir: Path
) -> None:
    check(soak(engine_dir, 300, num_warm_up=60), 300)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_5000_mixed_requests_end_once_each_and_nothing_grows(
    server_env: None, engine_dir: Path
) -> None:
    check(soak(engine_dir, 5000), 5000)


def test_growth_of_any_kind_is_told() -> None:
    before = Usage(
        num_requests=1,
        shm_files=3,
        shm_bytes=3 << 20,
        num_fds=80,
        num_threads=150,
        rss_bytes=1 << 29,
        units_used=0,
        units_cached=5,
    )
    assert list(growth([before, before])) == []
    for name, more in (
        ("shm_files", 1),
        ("shm_bytes", 2 << 20),
        ("num_fds", 9),
        ("num_threads", 33),
        ("rss_bytes", 65 << 20),
        ("units_used", 1),
    ):
        grown = Usage(**{**vars(before), name: getattr(before, name) + more})
        assert [line.split()[0] for line in growth([before, grown])] == [name]
