"""One engine: a scheduler, an executor and the loop step between them, single-threaded.

Owns sizing of the KV pool and the cache identity; leaves transport, text and waiting to
the clients in front of it. Invariant: between steps no plan is in flight.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from looptrt.errors import EngineError, RequestError
from looptrt.loop_spec import InitialState, NoiseMode
from looptrt.manifest import BuildLimits, Manifest
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.executor.torch import TorchExecutor
from looptrt.runtime.kv.prefix_cache import CacheIdentity
from looptrt.runtime.outputs import StepOutput
from looptrt.runtime.request import Request
from looptrt.runtime.scheduler import Scheduler, SchedulerConfig

_DEFAULT_KV_BYTES = 1 << 30
# Below this width a second CPU thread costs more in barriers than it brings (docs/log.md).
_THREADED_HIDDEN_SIZE = 512


class EngineCore:
    """Runs requests of one engine directory.

    Args:
        engine_dir: directory written by `looptrt build`.
        config: run-time limits and switches.

    Raises:
        ManifestError: the directory is damaged or of another version.
        EngineError: the configuration does not fit the engine or the machine.
    """

    def __init__(self, engine_dir: Path, config: EngineConfig) -> None:
        self.manifest = Manifest.load(engine_dir)
        if config.device != "cpu":
            raise EngineError(f"device: engines run on cpu only so far, got {config.device!r}")
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        elif self.manifest.spec.hidden_size < _THREADED_HIDDEN_SIZE:
            torch.set_num_threads(1)
        scheduler_config = _scheduler_config(self.manifest, config)
        self.executor = TorchExecutor(
            engine_dir,
            self.manifest,
            max_slots=scheduler_config.max_batch_size,
            max_seq_len=scheduler_config.max_seq_len,
            num_units=scheduler_config.num_units,
        )
        self.scheduler = Scheduler(
            scheduler_config, self.manifest.layout, cache_identity(self.manifest)
        )

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it could never run here.
            QueueFullError: the waiting queue is full.
        """
        prompt, vocab_size = request.prompt, self.manifest.spec.vocab_size
        if prompt.size and not 0 <= prompt.min() <= prompt.max() < vocab_size:
            raise RequestError(f"prompt: token ids must be from 0 to {vocab_size - 1}")
        self.scheduler.add(request)

    def abort_request(self, request_id: int) -> None:
        """End a request; unknown and ended ids are harmless."""
        self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        """Whether `step` would do or report anything."""
        return self.scheduler.has_work()

    def step(self) -> StepOutput:
        """Run one step and return its tokens and the requests it ended."""
        plan = self.scheduler.schedule()
        if plan is None:
            return StepOutput([], [], [], self.scheduler.take_ended())
        return self.scheduler.commit(plan, self.executor.execute(plan))

    def stats(self) -> dict[str, int | float]:
        """Queue, pool and cache figures by name."""
        return dataclasses.asdict(self.scheduler.stats())

    def close(self) -> None:
        """Nothing to release beyond what the process holds."""


def cache_identity(manifest: Manifest) -> CacheIdentity:
    """What makes cached pages of two engines interchangeable."""
    layout, spec = manifest.layout, manifest.spec
    return CacheIdentity(
        model=(
            manifest.fingerprint,
            manifest.dtype,
            layout.strategy.name,
            str(layout.page_size),
            manifest.noise_mode,
            repr(spec.state_std),
            repr(spec.state_scale),
        ),
        uses_noise=spec.initial_state is InitialState.RANDOM,
    )


def _scheduler_config(manifest: Manifest, config: EngineConfig) -> SchedulerConfig:
    limits, layout = config.limits(manifest), manifest.layout
    recomputable = not layout.strategy.overwrites and manifest.noise_mode is NoiseMode.POSITION
    if not recomputable and (config.prefix_grid is not None or config.prefix_depth != "exact"):
        raise EngineError(
            f"prefix_grid, prefix_depth: kv_planes {layout.strategy.name} with noise "
            f"{manifest.noise_mode} has no prefix cache; leave both at their defaults"
        )
    if config.prefix_grid is not None and config.prefix_grid % layout.page_size:
        raise EngineError(
            f"prefix_grid: expected a multiple of {layout.page_size} tokens per block, "
            f"got {config.prefix_grid}"
        )
    return SchedulerConfig(
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_seq_len=limits.max_seq_len,
        num_units=_num_units(manifest, config, limits),
        max_waiting=config.max_waiting,
        enable_prefix_cache=config.enable_prefix_cache,
        prefix_at_least=config.prefix_depth == "at_least",
        prefix_grid=config.prefix_grid,
        recomputable=not layout.strategy.overwrites and manifest.noise_mode is NoiseMode.POSITION,
    )


def _num_units(manifest: Manifest, config: EngineConfig, limits: BuildLimits) -> int:
    """Units of the pool, the null unit included."""
    layout = manifest.layout
    page_units = layout.units_of_page(layout.max_loops)
    if config.kv_cache_bytes is not None:
        num_units = config.kv_cache_bytes // layout.unit_bytes
        if num_units < page_units + 1:
            raise EngineError(
                f"kv_cache_bytes: {config.kv_cache_bytes} bytes hold {num_units} units of "
                f"{layout.unit_bytes} bytes; one page of {layout.max_loops} loops and the null "
                f"unit need {page_units + 1}"
            )
        return num_units
    sequence_units = layout.num_pages(limits.max_seq_len) * page_units
    affordable = max(_DEFAULT_KV_BYTES // layout.unit_bytes, page_units)
    return min(limits.max_batch_size * sequence_units, affordable) + 1
