"""An engine that says what a test tells it to, and ways to see what is left behind.

`ScriptedCore` has the interface of EngineCore without a model: `script(request)` is the
whole answer, given out one token a step to at most `num_slots` requests.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from looptrt.errors import QueueFullError, RequestError
from looptrt.kv_layout import PlaneLayout
from looptrt.loop_spec import (
    BlockKind,
    InitialState,
    LoopSpec,
    NoiseMode,
    RopeSpec,
    RopeStyle,
)
from looptrt.manifest import PHASES, BuildLimits, Manifest, PhaseGraph, TokenIds
from looptrt.models import ouro
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_client import InProcessClient
from looptrt.runtime.llm import LLM
from looptrt.runtime.outputs import FinishedRequest, StepOutput
from looptrt.runtime.request import FinishReason, Request

DEADLINE_S = 20.0
VOCAB = 1000


def manifest(eos: tuple[int, ...] = (2,), max_seq_len: int = 64) -> Manifest:
    """A manifest of an engine with 4 loops and nothing on disk."""
    spec = LoopSpec(
        architecture="OuroForCausalLM",
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position=max_seq_len,
        prelude_layers=0,
        core_layers=1,
        coda_layers=0,
        num_loops=4,
        block=BlockKind.SANDWICH,
        norm_eps=1e-6,
        rope=RopeSpec(RopeStyle.HALF_SPLIT, 1e4, False),
        initial_state=InitialState.EMBEDDING,
    )
    return Manifest(
        version="0",
        backend="pytorch",
        dtype="float32",
        logits_dtype="float32",
        spec=spec,
        layout=PlaneLayout.of(spec, page_size=4, max_loops=4, dtype="float32", kv_planes="latest"),
        limits=BuildLimits(4, max_seq_len, max_seq_len, 64),
        noise_mode=NoiseMode.POSITION,
        tokens=TokenIds(bos=None, eos=eos, pad=None, source="the test"),
        phases={name: PhaseGraph(f"{name}.onnx", (), ()) for name in PHASES},
        fingerprint="0",
        files={},
        build_flags={},
        tools={},
    )


@dataclass
class ScriptedCore:
    """See the module. With `turns` each step waits for one to be released.

    Attributes:
        seen: every request that was queued, in order.
        aborted: ids that an abort was asked for.
        fail_at_step: step that raises.
        error_token: ends a request with `error`; the caller never gets it.
        num_units: what the pool is said to hold.
    """

    script: Callable[[Request], list[int]]
    manifest: Manifest = field(default_factory=manifest)
    num_slots: int = 4
    max_waiting: int = 1024
    turns: threading.Semaphore | None = None
    fail_at_step: int | None = None
    error_token: int | None = None
    num_units: int = 10**6
    seen: list[Request] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    num_refused: int = 0
    num_steps: int = 0
    is_closed: bool = False

    def __post_init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._running: dict[int, tuple[Request, list[int], int]] = {}
        self._ended: list[FinishedRequest] = []

    def add_request(self, request: Request) -> None:
        if len(self._waiting) >= self.max_waiting:
            self.num_refused += 1
            raise QueueFullError(f"the waiting queue is full ({self.max_waiting} requests)")
        if request.cache_salt == b"never fits":
            raise RequestError("prompt: more pages than the pool")
        self.seen.append(request)
        self._waiting.append(request)

    def abort_request(self, request_id: int, reason: FinishReason) -> None:
        self.aborted.append(request_id)
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if request.request_id == request_id:
                self._end(request, reason, None)
            else:
                self._waiting.append(request)
        if request_id in self._running:
            self._end(self._running.pop(request_id)[0], reason, None)

    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._ended)

    def step(self) -> StepOutput:
        if self.turns is not None:
            assert self.turns.acquire(timeout=DEADLINE_S)
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise ZeroDivisionError("scripted")
        while self._waiting and len(self._running) < self.num_slots:
            request = self._waiting.popleft()
            self._running[request.request_id] = (request, self.script(request), 0)
        output = StepOutput()
        for request_id, (request, tokens, done) in list(self._running.items()):
            token = tokens[done]
            if token == self.error_token:
                self._end(request, FinishReason.ERROR, None)
                continue
            output.request_ids.append(request_id)
            output.token_ids.append(token)
            output.depths.append(request.loops)
            self._running[request_id] = (request, tokens, done + 1)
            if token in request.stop_token_ids:
                self._end(request, FinishReason.STOP, token)
            elif done + 1 == request.max_new_tokens:
                self._end(request, FinishReason.LENGTH, None)
        output.finished.extend(self._ended)
        self._ended.clear()
        return output

    def stats(self) -> dict[str, int | float]:
        return {
            "num_waiting": len(self._waiting),
            "num_running": len(self._running),
            "num_units": self.num_units,
        }

    def close(self) -> None:
        self.is_closed = True

    def _end(self, request: Request, reason: FinishReason, stop_id: int | None) -> None:
        self._running.pop(request.request_id, None)
        times = (0.0, 1.0, 2.0, 3.0)
        self._ended.append(FinishedRequest(request.request_id, reason, stop_id, 3, 4096, 0, *times))


def forever(request: Request) -> list[int]:
    """Token 5 up to the request's limit."""
    return [5] * request.max_new_tokens


def client_of(core: ScriptedCore, engine_dir: Path, **config: object) -> InProcessClient:
    """A client of a scripted engine."""
    return InProcessClient(engine_dir, EngineConfig(**config), lambda *_: core)  # type: ignore[arg-type]


def llm_of(core: ScriptedCore, engine_dir: Path, **config: object) -> LLM:
    """An LLM over a scripted engine; its tokenizer, if any, lies in `engine_dir`."""
    settings = EngineConfig(**config)  # type: ignore[arg-type]
    return LLM.over(client_of(core, engine_dir, **config), engine_dir, settings)


def write_tokenizer(engine_dir: Path, pieces: list[str]) -> None:
    """A tokenizer.json whose token i is pieces[i] and decodes by joining; `<...>` are special.

    Ouro's chat template goes beside it, where the builder puts it.
    """
    raw = Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0])
    )
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens([piece for piece in pieces if piece.startswith("<")])
    raw.save(str(engine_dir / "tokenizer.json"))
    assert ouro.FAMILY.chat_template is not None
    (engine_dir / "chat_template.jinja").write_text(ouro.FAMILY.chat_template)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what another thread or process brings about; fails at the deadline."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.005)


def step_until(core: ScriptedCore, condition: Callable[[], bool]) -> None:
    """Let the engine step, one turn at a time."""
    assert core.turns is not None
    turns = core.turns
    wait_until(lambda: condition() or bool(turns.release()), "what the engine's steps bring")


def open_descriptors() -> set[str]:
    """Descriptors of this process."""
    return set(os.listdir("/proc/self/fd"))


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
