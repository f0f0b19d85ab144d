"""What the operator of an engine decides when it starts, checked field by field.

Owns the fields and their ranges; leaves the sizing of the KV pool to `engine_core`.
Invariant: a limit may be lowered below the built engine's, never raised.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from looptrt.errors import EngineError
from looptrt.loop_spec import NoiseMode
from looptrt.manifest import BACKENDS, BuildLimits, Manifest
from looptrt.runtime.sampling_params import MAX_SEED, shown

PrefixDepth = Literal["exact", "at_least"]
CudaGraphs = Literal["auto", "step", "loop", "off"]
JoinedProjections = Literal["exact", "always", "never"]
MAX_SKINNY_ROWS = 16  # the kernel's (`plugins.launch`), whose module needs torch
MAX_GRAPH_ROWS = 8192
_DEVICES = re.compile(r"auto|cpu|cuda(:\d{1,2})?")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of a running engine.

    Args:
        kv_cache_bytes: KV pool. None on the CPU is enough for `max_batch_size` sequences of
            `max_seq_len` tokens at the deepest loop count, but at most 1 GiB (more only
            where a single page needs it); on a GPU see the next field. Requests that the
            pool can never hold are refused.
        kv_cache_free_gpu_memory_fraction: KV pool on a GPU when `kv_cache_bytes` is None: share
            of the memory that weights and the largest step leave free, at most 2**20 units.
        max_batch_size: sequences in one step; None is the built engine's limit.
        max_num_tokens: rows in one step; None is the built engine's limit.
        max_seq_len: prompt and answer together; None is the built engine's limit.
        max_waiting: requests that may wait; one more gets QueueFullError. Also the most
            answers that one prompt may ask for.
        max_logprobs: most likely tokens that a request may ask for at each position.
        enable_prefix_cache: reuse the KV of equal prompt beginnings.
        prefix_grid: hits and prefill chunks end at multiples of this many tokens, itself a
            multiple of the page size, and only pages of whole chunks are kept for hits; None
            leaves all of this free.
        prefix_depth: `exact` reuses pages of the prompt's own depth, `at_least` deeper
            ones too, which changes outputs.
        packed_prefill: run rows of several prompts in one step; False takes prompts one by one.
        prefill_share: let prompts that do not fit beside running answers have up to S whole
            steps between two steps with answers, S being the deepest answer's loops: first
            tokens come earlier, the others later.
        look_ahead: plan the next decode step, and give it to a GPU, while the one before it runs
            there, its tokens unknown; False waits for every step's tokens first.
        speculative_loops: up to four running requests guess tokens at this depth, which one
            step at full depth verifies; answers stay the same. None makes no guesses.
        noise: how a random initial state is drawn: `position`, a function of seed, position and
            channel, or `sequential`, in order from one generator a request, which excludes the
            prefix cache, preemption, speculation and CUDA graphs. None is as built; TensorRT
            engines run as built only.
        noise_seed: seed of the random initial state of requests that set none.
        device: `cpu`, `cuda`, `cuda:N`, or `auto`: the first GPU if the plugin library can
            run there, else the CPU.
        backend: `auto` is the one that the engine was built for; `pytorch` runs every engine
            directory, `tensorrt` and `tensorrt_rtx` those with engines of that TensorRT.
        cuda_graphs: what of a small step on a GPU is a CUDA graph: `step` all of it where that is
            possible, `loop` the prelude and each loop, `off` nothing; `auto` is `step`, but
            `off` where noise is drawn on the host and with a TensorRT backend, where the first
            two are refused. A CPU has no graphs, whatever is asked.
        max_graph_rows: rows of the largest step that is small in this sense, rounded up to a size
            that graphs have (`runtime.padding`), at most 8192; larger ones are launched kernel by
            kernel.
        fused_kernels: run operators on a GPU by the plugin library's kernels; False runs those
            that have PyTorch's bits as the chains of PyTorch's operators that they stand for.
        joined_projections: whether q, k and v, and gate and up, are one matrix product each where
            the checkpoint holds them apart. `exact` joins on a GPU what a check at start finds
            equal to the separate products, bit for bit, and everything on a CPU, where nothing
            is checked; `always` joins everything, `never` nothing.
        skinny_linear_rows: products of up to this many rows, at most 16, with matrices of up to
            48 MiB run by our own kernel, whose sums are not in cuBLAS's order: bfloat16 and
            float16 on a GPU, no TensorRT backend. 0 leaves all products to PyTorch. None is 8
            where the kernel can run and some matrix is small enough to gain, but 0 with
            `require_exact`.
        require_exact: refuse to start on a GPU where a kernel that promises PyTorch's bits
            does not give them, instead of running that operator op by op. By default all products
            are PyTorch's then; attention and the sampler, which promise other things, are not.
        cache_dir: where what was learned about this machine's kernels is kept between starts;
            None is `~/.cache/looptrt`.
        num_threads: CPU threads of the engine; None is 1 for models narrower than 512
            channels and torch's choice for others.
        start_timeout_s: how long loading may take.
        step_timeout_s: how long the engine may be silent while requests run.

    Raises:
        EngineError: a value is of the wrong type or out of range; names the field.
    """

    kv_cache_bytes: int | None = None
    kv_cache_free_gpu_memory_fraction: float = 0.9
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    max_waiting: int = 1024
    max_logprobs: int = 1024
    enable_prefix_cache: bool = True
    prefix_grid: int | None = None
    prefix_depth: PrefixDepth = "exact"
    packed_prefill: bool = True
    prefill_share: bool = True
    look_ahead: bool = True
    speculative_loops: int | None = None
    noise: str | None = None
    noise_seed: int = 0
    device: str = "auto"
    backend: str = "auto"
    cuda_graphs: CudaGraphs = "auto"
    max_graph_rows: int = 1024
    fused_kernels: bool = True
    joined_projections: JoinedProjections = "exact"
    skinny_linear_rows: int | None = None
    require_exact: bool = False
    cache_dir: str | None = None
    num_threads: int | None = None
    start_timeout_s: float = 300.0
    step_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in (
            "kv_cache_bytes",
            "max_batch_size",
            "max_num_tokens",
            "max_seq_len",
            "prefix_grid",
            "speculative_loops",
            "num_threads",
        ):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=1)
        _check_int("max_waiting", self.max_waiting, low=1)
        if self.skinny_linear_rows is not None:
            _check_int("skinny_linear_rows", self.skinny_linear_rows, low=0, high=MAX_SKINNY_ROWS)
        _check_int("max_graph_rows", self.max_graph_rows, low=1, high=MAX_GRAPH_ROWS)
        _check_int("max_logprobs", self.max_logprobs, low=0, high=2**18)
        _check_int("noise_seed", self.noise_seed, low=0, high=MAX_SEED)
        for name in ("start_timeout_s", "step_timeout_s"):
            _check_seconds(name, getattr(self, name))
        _check_share("kv_cache_free_gpu_memory_fraction", self.kv_cache_free_gpu_memory_fraction)
        self._check_choices()

    def _check_choices(self) -> None:
        for name in (
            "enable_prefix_cache",
            "packed_prefill",
            "prefill_share",
            "look_ahead",
            "fused_kernels",
            "require_exact",
        ):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, "true or false", getattr(self, name))
        for name, choices in (
            ("prefix_depth", PrefixDepth),
            ("cuda_graphs", CudaGraphs),
            ("joined_projections", JoinedProjections),
        ):
            if getattr(self, name) not in get_args(choices):
                raise _wrong(name, _any_of(get_args(choices)), getattr(self, name))
        if not isinstance(self.device, str) or not _DEVICES.fullmatch(self.device):
            raise _wrong("device", "auto, cpu, cuda or cuda:N", self.device)
        if self.backend not in ("auto", *BACKENDS):
            raise _wrong("backend", f"auto, {', '.join(BACKENDS)}", self.backend)
        if self.noise is not None and self.noise not in tuple(NoiseMode):
            raise _wrong("noise", _any_of([*NoiseMode]), self.noise)
        if self.cache_dir is not None and not isinstance(self.cache_dir, str):
            raise _wrong("cache_dir", "a path", self.cache_dir)

    def backend_of(self, manifest: Manifest) -> str:
        """What runs: the backend that was asked for, or the one that was built."""
        return manifest.backend if self.backend == "auto" else self.backend

    def limits(self, manifest: Manifest) -> BuildLimits:
        """The built engine's limits, lowered where this config says so.

        Raises:
            EngineError: a limit is above the built engine's.
        """
        built = manifest.limits
        max_seq_len = _lowered("max_seq_len", self.max_seq_len, built.max_seq_len)
        return BuildLimits(
            max_batch_size=_lowered("max_batch_size", self.max_batch_size, built.max_batch_size),
            max_input_len=min(built.max_input_len, max_seq_len),
            max_seq_len=max_seq_len,
            max_num_tokens=_lowered("max_num_tokens", self.max_num_tokens, built.max_num_tokens),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: the keyword arguments that make an equal config."""
        return asdict(self)


def _lowered(name: str, value: int | None, built: int) -> int:
    if value is None:
        return built
    if value > built:
        raise _wrong(name, f"at most {built}, the limit the engine was built with", value)
    return value


def _check_int(name: str, value: object, *, low: int, high: int = 2**63 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(name, f"an integer from {low} to {high}", value)


def _any_of(choices: Sequence[str]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"


def _check_seconds(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 86_400:  # type: ignore[operator]
        raise _wrong(name, "seconds above 0 and at most 86400", value)


def _check_share(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1:  # type: ignore[operator]
        raise _wrong(name, "a number above 0 and at most 1", value)


def _wrong(name: str, expected: str, value: object) -> EngineError:
    return EngineError(f"{name}: expected {expected}, got {shown(value)}")
