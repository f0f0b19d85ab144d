"""Engines with CUDA graphs against the same engines without, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import data_movement
import numpy as np
import pytest
import torch

from looptrt.manifest import Manifest
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_core import EngineCore
from looptrt.runtime.executor import step_graphs
from looptrt.runtime.request import ExitParams, ExitRule, FinishReason, Request, SamplerParams
from tests.e2e.test_engine_oracle import MAKERS, Build, engine_of, prompt_of

__all__ = ["engine_of"]

pytestmark = pytest.mark.gpu

CONFIG = {"device": "cuda", "kv_cache_bytes": 2**26}


def requests_of(loops: int, exits: bool) -> list[Request]:
    """Uniform and mixed depths, every kind of sampling, odd numbers."""
    samplers = [
        SamplerParams(),
        SamplerParams(temperature=0.9, seed=3),
        SamplerParams(temperature=1.2, seed=4, top_k=20, top_p=0.9, min_p=0.01),
        SamplerParams(repetition_penalty=1.3),
        SamplerParams(temperature=0.7, seed=5, logprobs=3),
        SamplerParams(prompt_logprobs=1),
    ]
    requests = []
    for index in range(11):
        prompt = prompt_of(5 + 7 * (index % 4), index)
        stops = ExitParams(rule=ExitRule.STEP, threshold=1) if exits and index % 3 == 0 else None
        requests.append(
            Request(
                request_id=index,
                prompt=np.array(prompt, np.int32),
                max_new_tokens=6 + index % 5,
                stop_token_ids=(3,) if index == 4 else (),
                loops=loops,
                prefill_loops=1 if index in (2, 7) else loops,
                sampler=samplers[index % 6] if index > 5 else SamplerParams(),
                **({"exit": stops} if stops else {}),
            )
        )
    return requests


def answers(
    engine_dir: Path, cache: Path, requests: list[Request], at_once: int, **config: Any
) -> tuple[dict[int, list[int]], dict[str, int | float]]:
    """Tokens of every request; `at_once` are added at the start, one more every other step."""
    core = EngineCore(engine_dir, EngineConfig(**{**CONFIG, "cache_dir": str(cache), **config}))
    waiting = list(requests)
    tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
    reasons = {}
    for step in range(2000):
        while waiting and (at_once > 0 or step % 2 == 0):
            core.add_request(waiting.pop(0))
            at_once -= 1
            if at_once <= 0:
                break
        if not core.has_work() and not waiting:
            break
        output = core.step()
        for request_id, token in zip(output.request_ids, output.token_ids, strict=True):
            tokens[request_id].append(token)
        reasons |= {entry.request_id: entry.reason for entry in output.finished}
    assert reasons.keys() == tokens.keys()
    assert FinishReason.ERROR not in reasons.values()
    core.scheduler.check_integrity()
    stats = core.stats()
    assert stats["num_free_units"] + stats["num_cached_units"] == stats["num_units"]
    core.close()
    return tokens, stats


@pytest.mark.parametrize("at_once", [1, 11])
@pytest.mark.parametrize("exits", [False, True], ids=["planned", "exits"])
@pytest.mark.parametrize("model", MAKERS)
def test_tokens_do_not_depend_on_graphs(
    engine_of: Build, model: str, exits: bool, at_once: int, tmp_path_factory: Any
) -> None:
    engine_dir, _ = engine_of(model)
    cache = tmp_path_factory.getbasetemp() / "cache"
    loops = EngineCore(engine_dir, EngineConfig(device="cpu")).manifest.spec.num_loops
    expected, stats = answers(
        engine_dir, cache, requests_of(loops, exits), at_once, cuda_graphs="off"
    )
    assert stats.get("graph_captures", 0) == 0
    for mode in ("loop", "step"):
        got, stats = answers(
            engine_dir, cache, requests_of(loops, exits), at_once, cuda_graphs=mode
        )
        assert got == expected, mode
        assert stats["graph_hits"] > 0, mode


@pytest.mark.multi_gpu
@pytest.mark.parametrize("mode", ["off", "loop", "step"])
@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_another_gpu_than_the_current_one_gives_the_same_tokens(
    engine_of: Build, model: str, mode: str, tmp_path: Path
) -> None:
    """Fails where an event, a stream or a wait is the current GPU's, which lies idle."""
    engine_dir, _ = engine_of(model)
    loops = Manifest.load(engine_dir).spec.num_loops
    assert torch.cuda.current_device() == 0
    got = {}
    for device in ("cuda:0", "cuda:1"):
        requests = requests_of(loops, True)
        tokens, stats = answers(engine_dir, tmp_path, requests, 11, device=device, cuda_graphs=mode)
        got[device] = tokens
        assert (stats.get("graph_hits", 0) > 0) == (mode != "off")
        assert torch.cuda.current_device() == 0
    assert got["cuda:1"] == got["cuda:0"]


def test_filling_rows_stand_at_positions_that_there_are(engine_of: Build, tmp_path: Path) -> None:
    """PyTorch's own rope looks positions up, so one past the table ends the process's CUDA."""
    engine_dir, _ = engine_of("ouro")
    manifest = EngineCore(engine_dir, EngineConfig(device="cpu")).manifest
    assert manifest.limits.max_seq_len < manifest.limits.max_num_tokens  # of the largest graph
    config = {"fused_kernels": False, "max_seq_len": 48}
    requests = requests_of(4, False)
    expected, _ = answers(engine_dir, tmp_path, requests, 11, cuda_graphs="off", **config)
    requests = requests_of(4, False)  # an engine's run leaves its marks on them
    got, stats = answers(engine_dir, tmp_path, requests, 11, cuda_graphs="step", **config)
    assert got == expected
    assert stats["graph_hits"] > 0


def test_old_graphs_make_room_and_answers_stay(
    engine_of: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(step_graphs, "graphs_kept", lambda _num_usual: 3)
    engine_dir, _ = engine_of("ouro")
    expected, _ = answers(engine_dir, tmp_path, requests_of(4, False), 1, cuda_graphs="off")
    got, stats = answers(engine_dir, tmp_path, requests_of(4, False), 1, cuda_graphs="loop")
    assert got == expected
    assert stats["graph_evictions"] > 0


@pytest.mark.parametrize("model", ["ouro", "huginn"])
def test_a_decode_step_is_one_launch_and_one_event_without_copies(
    engine_of: Build, model: str, tmp_path: Path
) -> None:
    engine_dir, _ = engine_of(model)
    core = EngineCore(engine_dir, EngineConfig(**CONFIG, cache_dir=str(tmp_path)))
    steps = 12
    totals = data_movement.profiled(core, 3, steps, 16)["totals"]
    core.close()
    assert totals.get("HtoD", 0) == totals.get("DtoH", 0) == 0
    assert totals["launches"] == totals["records"] == totals["waits"] == steps
