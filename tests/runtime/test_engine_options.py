from __future__ import annotations

import argparse
from typing import Any

import pytest

from looptrt.cli.engine_options import add_engine_options, engine_config
from looptrt.errors import EngineError
from looptrt.runtime.config import EngineConfig

# Requests set it themselves; an operator's default would only split the prefix cache.
WITHOUT_FLAG = {"noise_seed"}
OTHER_VALUES: dict[str, Any] = {
    "kv_cache_bytes": 2**20,
    "enable_prefix_cache": False,
    "prefix_depth": "at_least",
    "device": "cuda:1",
    "backend": "tensorrt_rtx",
    "kv_cache_free_gpu_memory_fraction": 0.5,
    "require_exact": True,
    "cuda_graphs": "loop",
    "fused_kernels": False,
    "packed_prefill": False,
    "prefill_share": False,
    "look_ahead": False,
    "joined_projections": "never",
    "skinny_linear_rows": 8,
    "noise": "sequential",
    "cache_dir": "there",
    "start_timeout_s": 7.5,
    "step_timeout_s": 8.5,
}


def parsed(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return engine_config(parser.parse_args(arguments))


@pytest.mark.parametrize("spelling", ["-", "_"])
def test_every_field_has_a_flag_that_sets_it(spelling: str) -> None:
    for name in EngineConfig.__dataclass_fields__.keys() - WITHOUT_FLAG:
        value = OTHER_VALUES.get(name, 48)
        flag = name.replace("_", spelling)
        switches = {True: [f"--{flag}"], False: [f"--no-{flag}"]}
        arguments = switches[value] if isinstance(value, bool) else [f"--{flag}", str(value)]
        config = parsed(*arguments)
        assert getattr(config, name) == value, name
        assert config != EngineConfig()


def test_without_flags_the_defaults_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert parsed() == EngineConfig()
    monkeypatch.setenv("XDG_CACHE_HOME", "/place")
    assert parsed() == EngineConfig(cache_dir="/place/looptrt")


def test_a_value_out_of_range_names_its_field() -> None:
    with pytest.raises(EngineError, match="max_waiting: expected"):
        parsed("--max-waiting", "0")
