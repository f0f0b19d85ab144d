"""One engine: a scheduler, an executor and the loop step between them, single-threaded.

Owns sizing of the KV pool and the cache identity; leaves transport, text and waiting to
the clients in front of it. Invariant: plans are run and committed in the order in which they
were made; at most one is in flight between steps, and only where the GPU works on it meanwhile.
"""

from __future__ import annotations

import dataclasses
import resource
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from looptrt.errors import EngineError, RequestError
from looptrt.loop_spec import InitialState, NoiseMode
from looptrt.manifest import TENSORRT_BACKENDS, WEIGHTS_NAME, Manifest
from looptrt.plugins import unfused
from looptrt.plugins.ops import Operators
from looptrt.plugins.products import Products
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.device import choose_device, free_beside_scratch
from looptrt.runtime.executor.base import Executor
from looptrt.runtime.executor.cuda import CudaExecutor
from looptrt.runtime.executor.tensorrt import TensorRtExecutor
from looptrt.runtime.executor.tensorrt_engine import open_engines
from looptrt.runtime.executor.torch import TorchExecutor
from looptrt.runtime.kernel_checks import settle_kernels
from looptrt.runtime.kv.prefix_cache import CacheIdentity
from looptrt.runtime.outputs import StepOutput
from looptrt.runtime.pool_size import pool_units
from looptrt.runtime.product_checks import check_asked, settle_products
from looptrt.runtime.request import FinishReason, Request
from looptrt.runtime.scheduler import Scheduler, SchedulerConfig
from looptrt.runtime.scheduler_config import check_rows
from looptrt.runtime.step_plan import StepPlan, StepResult

# Below this width a second CPU thread costs more in barriers than it brings (docs/log.md).
_THREADED_HIDDEN_SIZE = 512


class EngineCore:
    """Runs requests of one engine directory.

    Args:
        engine_dir: directory written by `looptrt build`.
        config: run-time limits and switches.

    Attributes:
        manifest: of the directory, with the noise mode that runs.
        device: where it runs.
        products: how its matrix products are computed.
        executor: of its steps.
        scheduler: of its requests.

    Raises:
        ManifestError: the directory is damaged or of another version.
        EngineError: the configuration does not fit the engine or the machine.
    """

    def __init__(self, engine_dir: Path, config: EngineConfig) -> None:
        built = Manifest.load(engine_dir)
        backend = config.backend_of(built)
        self.manifest = checked(built, config)
        self.device = device = _device(config, backend)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        elif self.manifest.spec.hidden_size < _THREADED_HIDDEN_SIZE:
            torch.set_num_threads(1)
        check_asked(config, self.manifest.dtype, backend, device)
        make_executor: Callable[..., Executor] = TorchExecutor
        products, operators, free_bytes = Products(), Operators(), None
        if backend in TENSORRT_BACKENDS:
            # No operator of a compiled engine can be replaced by its unfused form.
            settle_kernels(self.manifest, replace(config, require_exact=True), device)
            engines = open_engines(engine_dir, self.manifest, backend, device)
            make_executor = partial(TensorRtExecutor, engines)
            # The pool's size is reckoned from what was free before weights were loaded.
            weight_bytes = self.manifest.files[WEIGHTS_NAME][1]
            free_bytes = torch.cuda.mem_get_info(device)[0] + weight_bytes
        else:
            products = settle_products(self.manifest, config, device)
            if device.type == "cuda":
                make_executor = CudaExecutor
                is_fused = config.fused_kernels
                operators = Operators(
                    settle_kernels(self.manifest, config, device) if is_fused else unfused.EXACT
                )
                limits = config.limits(self.manifest)
                free_bytes = free_beside_scratch(device, self.manifest, config, limits)
        self.products = products
        scheduler_config = _scheduler_config(self.manifest, config, free_bytes)
        self.executor = make_executor(
            engine_dir,
            self.manifest,
            max_slots=scheduler_config.max_batch_size,
            max_seq_len=scheduler_config.max_seq_len,
            num_units=scheduler_config.num_units,
            device=device,
        )
        try:
            self.executor.use_products(products)
            self.executor.use_operators(operators)
            graph_rows = min(scheduler_config.max_num_tokens, config.max_graph_rows)
            self.executor.use_graphs(config.cuda_graphs, graph_rows)
            self.scheduler = Scheduler(
                scheduler_config, self.manifest.layout, cache_identity(self.manifest)
            )
        except BaseException:
            self.executor.close()
            raise
        self._looks_ahead = config.look_ahead
        self._in_flight: deque[tuple[StepPlan, Callable[[], StepResult]]] = deque()
        self._is_closed = False

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

    def abort_request(self, request_id: int, reason: FinishReason) -> None:
        """End a request for this reason; unknown and ended ids are harmless."""
        self.scheduler.abort(request_id, reason)

    def has_work(self) -> bool:
        """Whether `step` would do or report anything."""
        return self.scheduler.has_work()

    def step(self) -> StepOutput:
        """Finish one step, start the next one where that is possible without its tokens.

        Returns:
            The finished step's tokens and the requests it ended.

        Raises:
            EngineError: the engine was closed, or cannot go on.
        """
        if self._is_closed:
            raise EngineError("the engine was shut down")
        if not self._in_flight:
            self._submit(self.scheduler.schedule())
        if not self._in_flight:
            return StepOutput([], [], [], self.scheduler.take_ended())
        plan, result = self._in_flight[0]
        if self._looks_ahead and self.executor.runs_ahead(plan):
            self._submit(self.scheduler.schedule_ahead())
        self._in_flight.popleft()
        return self.scheduler.commit(plan, result())

    def _submit(self, plan: StepPlan | None) -> None:
        if plan is not None:
            self._in_flight.append((plan, self.executor.submit(plan)))

    def stats(self) -> dict[str, int | float]:
        """Queue, pool, cache and memory figures by name."""
        gpu_bytes = 0
        if self.device.type == "cuda":
            gpu_bytes = torch.cuda.memory_reserved(self.device)
            gpu_bytes += self.executor.num_units * self.manifest.layout.unit_bytes
        return {
            **dataclasses.asdict(self.scheduler.stats()),
            **self.executor.stats(),
            "cpu_memory_bytes": _resident_bytes(),
            "gpu_memory_bytes": gpu_bytes,
        }

    def close(self) -> None:
        """Release device memory, that of a step in flight too; the engine cannot be used again."""
        self._is_closed = True
        self.executor.close()
        self._in_flight.clear()


def _resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * resource.getpagesize()


def _device(config: EngineConfig, backend: str) -> torch.device:
    """Where the engine runs; compiled engines run on a GPU or not at all."""
    if backend not in TENSORRT_BACKENDS:
        return choose_device(config.device)
    try:
        device = choose_device("cuda" if config.device == "auto" else config.device)
    except EngineError as error:
        raise EngineError(
            f"backend {backend}: {error}; backend pytorch runs the same model without a GPU"
        ) from error
    if device.type != "cuda":
        raise EngineError(
            f"backend {backend}: TensorRT engines run on a GPU, got device {config.device}; "
            "backend pytorch runs the same model on the CPU"
        )
    return device


def checked(built: Manifest, config: EngineConfig) -> Manifest:
    """The manifest as it runs, where all settings but those about the machine fit it.

    Args:
        built: of the engine directory.
        config: what was asked.

    Raises:
        EngineError: a setting does not fit the engine; names it and why.
    """
    manifest = _with_noise(built, config.noise, config.backend_of(built))
    limits = config.limits(manifest)
    check_rows(limits.max_num_tokens, limits.max_batch_size, config.prefix_grid)
    _check_prefixes(manifest, config)
    _check_speculation(manifest, config)
    is_drawn = manifest.spec.initial_state is InitialState.RANDOM
    is_drawn &= manifest.noise_mode is NoiseMode.SEQUENTIAL
    if is_drawn and config.cuda_graphs in ("step", "loop"):
        raise EngineError(
            f"cuda_graphs: expected auto or off, got {config.cuda_graphs}: noise "
            f"{manifest.noise_mode} is drawn on the host, which no graph can be part of"
        )
    return manifest


def is_recomputable(manifest: Manifest) -> bool:
    """Whether KV is the same however often and in whatever chunks it is computed.

    The prefix cache, preemption and speculation rest on it.
    """
    return not manifest.layout.strategy.overwrites and manifest.noise_mode is NoiseMode.POSITION


def _with_noise(manifest: Manifest, asked: str | None, backend: str) -> Manifest:
    """The manifest with the noise mode that was asked for.

    Raises:
        EngineError: there is no noise, or another mode of it is compiled in.
    """
    if asked is None:
        return manifest
    spec = manifest.spec
    if spec.initial_state is not InitialState.RANDOM:
        raise EngineError(
            f"noise: {spec.architecture} has no random initial state; leave it at its default"
        )
    noise_mode = NoiseMode(asked)
    if backend in TENSORRT_BACKENDS and noise_mode is not manifest.noise_mode:
        raise EngineError(
            f"noise: expected {manifest.noise_mode}, got {asked}: backend {backend} runs what was "
            f"compiled; rebuild with --noise {asked}, or choose backend pytorch"
        )
    return replace(manifest, noise_mode=noise_mode)


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


def _scheduler_config(
    manifest: Manifest, config: EngineConfig, free_bytes: int | None
) -> SchedulerConfig:
    limits = config.limits(manifest)
    return SchedulerConfig(
        max_batch_size=limits.max_batch_size,
        max_num_tokens=limits.max_num_tokens,
        max_seq_len=limits.max_seq_len,
        num_units=pool_units(manifest, config, limits, free_bytes),
        max_waiting=config.max_waiting,
        enable_prefix_cache=config.enable_prefix_cache,
        prefix_at_least=config.prefix_depth == "at_least",
        prefix_grid=config.prefix_grid,
        recomputable=is_recomputable(manifest),
        packed_prefill=config.packed_prefill,
        prefill_share=config.prefill_share,
        draft_loops=config.speculative_loops,
    )


def _check_prefixes(manifest: Manifest, config: EngineConfig) -> None:
    layout, is_asked = manifest.layout, config.prefix_grid is not None
    is_asked |= config.prefix_depth != "exact"
    if is_asked and not is_recomputable(manifest):
        raise EngineError(
            f"prefix_grid, prefix_depth: kv_planes {layout.strategy.name} with noise "
            f"{manifest.noise_mode} has no prefix cache; leave both at their defaults"
        )
    if config.prefix_grid is not None and config.prefix_grid % layout.page_size:
        raise EngineError(
            f"prefix_grid: expected a multiple of {layout.page_size} tokens per block, "
            f"got {config.prefix_grid}"
        )


def _check_speculation(manifest: Manifest, config: EngineConfig) -> None:
    loops, layout = config.speculative_loops, manifest.layout
    if loops is None:
        return
    if not is_recomputable(manifest):
        raise EngineError(
            f"speculative_loops: a guess would overwrite what kv_planes {layout.strategy.name} "
            f"with noise {manifest.noise_mode} cannot compute again; leave it at its default"
        )
    if loops >= layout.max_loops:
        raise EngineError(
            f"speculative_loops: expected fewer than the engine's {layout.max_loops} loops, "
            f"got {loops}"
        )
