"""Which changes an engine cannot show, and why: told by name before anything is measured.

Owns the reasons; leaves the changes to `changes` and measuring to `ladder`. Invariant: a change
that stays has two sides that differ here, and settings that the engine takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from looptrt.bench.changes import Change
from looptrt.bench.offline import Engine
from looptrt.errors import LooptrtError
from looptrt.loop_spec import InitialState, NoiseMode
from looptrt.manifest import TENSORRT_BACKENDS, Manifest
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_core import checked, is_recomputable
from looptrt.runtime.sampling_params import SamplingParams


def reasons(
    changes: Sequence[Change],
    loops: int,
    engine: Engine,
    config: EngineConfig,
    params: SamplingParams,
) -> dict[str, str]:
    """Why changes cannot be compared, by their names; those that can are not in it.

    Args:
        changes: that were asked for.
        loops: of the requests' generated tokens.
        engine: that runs, of the default arm.
        config: of the default arm.
        params: of the default arm's requests.
    """
    found = {
        change.name: _lacks(change, engine, config)
        or _refusal(change, loops, engine, config, params)
        or _same_sides(change, loops, config, params)
        for change in changes
    }
    return {name: reason for name, reason in found.items() if reason is not None}


def sentences(left_out: Mapping[str, str]) -> str:
    """The changes of each reason, as one line; empty for none."""
    by_reason = sorted(left_out.items(), key=lambda item: item[1])
    return " ".join(
        f"Not compared, {reason}: {', '.join(name for name, _ in items)}."
        for reason, items in groupby(by_reason, key=lambda item: item[1])
    )


def _lacks(change: Change, engine: Engine, config: EngineConfig) -> str | None:
    """What the change is about and this engine does not have."""
    manifest, facts = engine.manifest, engine.facts
    is_compiled = config.backend_of(manifest) in TENSORRT_BACKENDS
    if change.gpu_only and is_compiled:
        return "as TensorRT has compiled its own"
    if change.gpu_only and not facts.on_gpu:
        return "for want of a GPU"
    if change.needs_graphs and facts.graphs not in change.needs_graphs:
        return f"as cuda_graphs are {facts.graphs} here"
    if change.needs_noise and (is_compiled or not _draws_by_position(manifest)):
        return "for want of position-keyed noise that can be switched off"
    if change.needs_recomputing and not is_recomputable(manifest):
        planes, noise = manifest.layout.strategy.name, manifest.noise_mode
        return f"as kv_planes {planes} with noise {noise} cannot be computed again"
    if change.needs_joined and not facts.num_joined:
        return "as the engine joins none of the checkpoint's products"
    if change.few_rows and not facts.skinny_rows:
        return "as all products are PyTorch's here"
    return None


def _draws_by_position(manifest: Manifest) -> bool:
    is_random = manifest.spec.initial_state is InitialState.RANDOM
    return is_random and manifest.noise_mode is NoiseMode.POSITION


def _refusal(
    change: Change, loops: int, engine: Engine, config: EngineConfig, params: SamplingParams
) -> str | None:
    """What is said to the settings of a side."""
    try:
        for arm in change.arms(loops):
            checked(engine.manifest, arm.engine_config(config))
            arm.params(params)
    except LooptrtError as error:
        return f"as its settings are refused ({error})"
    return None


def _same_sides(
    change: Change, loops: int, config: EngineConfig, params: SamplingParams
) -> str | None:
    if change.halves_loops and loops < 2:
        return "as half of one loop is none"
    one, other = (
        (arm.engine_config(config), arm.params(params), arm.kv_layout) for arm in change.arms(loops)
    )
    return "as the default arm's settings decide it" if one == other else None
