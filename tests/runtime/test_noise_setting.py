"""`noise`: an engine directory run with the other way of drawing random initial states."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from looptrt.errors import EngineError
from looptrt.loop_spec import NoiseMode
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_core import EngineCore, cache_identity
from tests.e2e.test_engine_oracle import Build, engine_of, prompt_of
from tests.support.engines import Harness
from tests.support.graphs_on_cpu import use_graphs_on_cpu

__all__ = ["engine_of"]


def drained(harness: Harness) -> list[tuple[list[int], torch.Tensor, int]]:
    """Tokens, logits and cached tokens of three requests, two of the same prompt and seed."""
    found = []
    for seed in (1, 2, 1):
        request_id = harness.add(prompt_of(21, seed), 5, noise_seed=seed)
        harness.drain()
        answer = harness.answers[request_id]
        assert answer.finished is not None
        logits = torch.stack(answer.logits)
        found.append((answer.token_ids, logits, answer.finished.num_cached_tokens))
    return found


@pytest.mark.parametrize("built", NoiseMode)
@pytest.mark.parametrize("model", ["huginn", "olmo"])
def test_the_setting_makes_the_engine_that_would_have_been_built(
    engine_of: Build, model: str, built: NoiseMode
) -> None:
    (other,) = {*NoiseMode} - {built}
    harnesses = [
        Harness(engine_of(model, noise=built)[0], noise=other.value),
        Harness(engine_of(model, noise=other)[0]),
        Harness(engine_of(model, noise=built)[0]),
    ]
    ours, expected, unlike = map(drained, harnesses)
    for (tokens, logits, cached), (other_tokens, other_logits, other_cached) in zip(
        ours, expected, strict=True
    ):
        assert tokens == other_tokens
        assert torch.equal(logits, other_logits)
        assert cached == other_cached
    assert (ours[2][2] > 0) is (other is NoiseMode.POSITION), "hits need position-keyed noise"
    assert not torch.equal(ours[0][1], unlike[0][1])
    roots = [cache_identity(harness.core.manifest).root(None, 0) for harness in harnesses]
    assert roots[0] == roots[1] != roots[2], "pages of the two modes would be taken for another"


def test_asking_for_what_was_built_changes_nothing(engine_of: Build) -> None:
    engine_dir, _ = engine_of("huginn")
    default, asked = (Harness(engine_dir, noise=noise) for noise in (None, "position"))
    for (tokens, logits, _), (others, other_logits, _) in zip(
        drained(default), drained(asked), strict=True
    ):
        assert tokens == others
        assert torch.equal(logits, other_logits)


@pytest.mark.parametrize(("noise", "has_graphs"), [(None, True), ("sequential", False)])
def test_states_drawn_on_the_host_run_without_graphs_and_a_line_says_so(
    engine_of: Build,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    noise: str | None,
    has_graphs: bool,
) -> None:
    use_graphs_on_cpu(monkeypatch)
    caplog.set_level(logging.INFO)
    harness = Harness(engine_of("huginn")[0], noise=noise, max_graph_rows=32)
    harness.add(prompt_of(21), 5)
    harness.drain()
    assert len(harness.answers[0].token_ids) == 5
    assert (harness.core.executor.stats().get("graph_hits", 0) > 0) is has_graphs
    told = [text for text in caplog.messages if text.startswith("cuda_graphs auto: no step is")]
    assert len(told) == (not has_graphs)


@pytest.mark.parametrize("noise", NoiseMode)
@pytest.mark.parametrize("model", ["ouro", "olmo_embed_init"])
def test_models_without_a_random_state_have_no_noise_to_set(
    engine_of: Build, model: str, noise: NoiseMode
) -> None:
    with pytest.raises(EngineError, match=r"noise: \w+ has no random initial state; leave it"):
        EngineCore(engine_of(model)[0], EngineConfig(device="cpu", noise=noise.value))


def test_noise_that_is_compiled_in_stays(engine_of: Build) -> None:
    engine_dir, _ = engine_of("huginn")
    message = (
        "noise: expected position, got sequential: backend tensorrt_rtx runs what was compiled; "
        "rebuild with --noise sequential, or choose backend pytorch"
    )
    with pytest.raises(EngineError, match=message):
        EngineCore(engine_dir, EngineConfig(backend="tensorrt_rtx", noise="sequential"))
    with pytest.raises(EngineError, match="device cpu"):  # refused for another reason
        EngineCore(engine_dir, EngineConfig(backend="tensorrt_rtx", device="cpu", noise="position"))


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"prefix_grid": 16}, "noise sequential has no prefix cache"),
        ({"prefix_depth": "at_least"}, "noise sequential has no prefix cache"),
        ({"speculative_loops": 2}, "noise sequential cannot compute again"),
        ({"cuda_graphs": "step"}, "cuda_graphs: expected auto or off, got step: noise sequential"),
        ({"cuda_graphs": "loop"}, "cuda_graphs: expected auto or off, got loop: noise sequential"),
    ],
)
def test_what_needs_position_keyed_noise_is_refused_without_it(
    engine_of: Build, needs: dict[str, Any], message: str
) -> None:
    config = EngineConfig(device="cpu", noise="sequential", **needs)
    with pytest.raises(EngineError, match=message):
        EngineCore(engine_of("huginn")[0], config)


@pytest.mark.parametrize("noise", ["Position", "random", "", 0, True, ["position"]])
def test_other_modes_are_refused(noise: object) -> None:
    with pytest.raises(EngineError, match="noise: expected position or sequential, got"):
        EngineConfig(noise=noise)  # type: ignore[arg-type]
