"""An engine whose requests are all there before its first step, so that batches repeat exactly.

Owns that engine, in a process of its own or in this one; leaves what is compared to `ladder`.
Invariant: two engines with the same schedule run the same batches for the same requests, and
every wait has a deadline.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from looptrt.bench.runs import Prompt, Record, Run
from looptrt.bench.watch import gained
from looptrt.errors import EngineError, LooptrtError
from looptrt.manifest import Manifest
from looptrt.models.weights import empty_model
from looptrt.runtime.admission import Admission
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.engine_process import load_core
from looptrt.runtime.outputs import FinishedRequest
from looptrt.runtime.request import FinishReason
from looptrt.runtime.sampling_params import SamplingParams
from looptrt.runtime.tokenizer import Tokenizer

_GRACE_S = 30.0  # of a child, beyond the deadline that it keeps itself
_STOP_S = 10.0


@dataclass(frozen=True)
class Answers:
    """One run and what the engine's counters gained."""

    run: Run
    counters: Mapping[str, int | float]

    @staticmethod
    def one_after_the_other(parts: Sequence[Answers]) -> Answers:
        """Runs of one engine as one run, their requests in order."""
        records = [record for part in parts for record in part.run.records]
        counters: Counter[str] = Counter()
        for part in parts:
            counters.update(part.counters)
        ordered = tuple(replace(record, index=index) for index, record in enumerate(records))
        return Answers(Run(ordered, sum(part.run.wall_s for part in parts)), counters)


@dataclass(frozen=True)
class Facts:
    """What a running engine is like.

    Attributes:
        num_units: of the KV pool that requests may own.
        on_gpu: whether it runs on a GPU.
        graphs: its `cuda_graphs`; `off` where it has none, whatever was asked.
        skinny_rows: up to which its matrix products are our own kernel's; 0 where none are.
        num_joined: products of several of the checkpoint's matrices that run as one.
    """

    num_units: int
    on_gpu: bool
    graphs: str
    skinny_rows: int
    num_joined: int


class Engine(Protocol):
    """What the ladder needs, wherever it runs."""

    @property
    def manifest(self) -> Manifest:
        """Of the engine directory."""

    @property
    def facts(self) -> Facts:
        """What it is like."""

    def answer(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], deadline_s: float
    ) -> Answers:
        """Answer prompts that are all queued before the first step."""


class OfflineEngine:
    """The engine in this process.

    Args:
        engine_dir: directory written by `looptrt build`.
        config: settings of the engine.

    Raises:
        LooptrtError: the engine could not start.
    """

    def __init__(self, engine_dir: Path, config: EngineConfig) -> None:
        self._core = load_core(engine_dir, config)
        self.manifest = self._core.manifest
        stats, products = self._core.stats(), self._core.products
        joined = set(empty_model(self.manifest).joined_products()) - products.apart
        self.facts = Facts(
            num_units=int(stats["num_units"]),
            on_gpu=self._core.device.type == "cuda",
            graphs=config.cuda_graphs if "graph_captures" in stats else "off",
            skinny_rows=products.max_skinny_rows,
            num_joined=len(joined),
        )
        self._tokenizer = Tokenizer.of_engine(engine_dir)
        self._admission = Admission(
            manifest=self.manifest,
            num_units=self.facts.num_units,
            limits=config.limits(self.manifest),
            config=config,
            tokenizer=self._tokenizer,
            template=None,
        )
        self._next_id = 0

    def answer(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], deadline_s: float
    ) -> Answers:
        """Queue everything, then step until nothing is left.

        What is not whole at the deadline is aborted; refused and failed requests are recorded.
        """
        core, before = self._core, self._core.stats()
        start_s = time.monotonic()
        records: dict[int, Record] = {}
        places: dict[int, int] = {}
        tokens: dict[int, list[int]] = {}
        for index, (prompt, of_prompt) in enumerate(zip(prompts, params, strict=True)):
            try:
                admitted = self._admission.admit(
                    self._next_id, self._admission.encode(prompt), of_prompt
                )
                (request,) = admitted.requests
                core.add_request(request)
            except LooptrtError as error:
                records[index] = Record(index, start_s, error=f"{type(error).__name__}: {error}")
                continue
            places[request.request_id], tokens[request.request_id] = index, []
            self._next_id += 1
        for ended in self._steps(tokens, start_s + deadline_s):
            index = places[ended.request_id]
            records[index] = self._record(index, start_s, ended, tokens[ended.request_id])
        counters = gained(before, core.stats())
        ordered = tuple(records[index] for index in range(len(prompts)))
        ends = [record.finished_s for record in ordered if record.finished_s is not None]
        wall_s = max(ends, default=time.monotonic()) - start_s
        return Answers(Run(ordered, wall_s), counters)

    def close(self) -> None:
        """Release the engine's memory."""
        self._core.close()

    def _steps(self, tokens: dict[int, list[int]], end_s: float) -> Iterator[FinishedRequest]:
        core, is_late = self._core, False
        while core.has_work():
            if not is_late and time.monotonic() > end_s:
                is_late = True
                for request_id in tokens:
                    core.abort_request(request_id, FinishReason.ABORT)
            output = core.step()
            for request_id, token_id in zip(output.request_ids, output.token_ids, strict=True):
                tokens[request_id].append(token_id)
            yield from output.finished

    def _record(
        self, index: int, start_s: float, ended: FinishedRequest, token_ids: list[int]
    ) -> Record:
        error = None
        if ended.reason is FinishReason.ABORT:
            error = "not finished within the run's deadline"
        elif ended.reason is FinishReason.ERROR:
            error = "the model's logits are not finite"
        shown = token_ids if ended.stop_token_id is None else token_ids[:-1]
        return Record(
            index=index,
            due_s=start_s,
            num_prompt=ended.num_prompt_tokens,
            num_cached=ended.num_cached_tokens,
            num_preemptions=ended.num_preemptions,
            token_ids=tuple(token_ids),
            text="" if self._tokenizer is None else self._tokenizer.decode(shown),
            finish_reason=ended.reason.value,
            first_token_s=ended.first_token_s,
            last_token_s=ended.last_token_s,
            finished_s=ended.finished_s,
            error=error,
        )


class OfflineProcess:
    """The same in a process of its own, with CPU threads, memory and garbage of its own.

    Raises:
        EngineError: the engine could not start, has ended or does not answer.
    """

    def __init__(self, engine_dir: Path, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, str(engine_dir), config.to_json()), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            manifest, facts = self._receive(config.start_timeout_s)
        except BaseException:
            self.close()
            raise
        self.manifest: Manifest = Manifest.from_json(manifest, engine_dir)
        self.facts: Facts = facts

    def answer(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], deadline_s: float
    ) -> Answers:
        """See `OfflineEngine.answer`."""
        self._connection.send((prompts, params, deadline_s))
        answers: Answers = self._receive(deadline_s + _GRACE_S)
        return answers

    def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        self._connection.close()
        self._process.join(_STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self, timeout_s: float) -> Any:  # noqa: ANN401 - whatever the child sends
        try:
            if not self._connection.poll(timeout_s):
                raise EngineError(f"the engine's process gave no answer within {timeout_s:g} s")
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(_STOP_S)
            raise EngineError(
                f"the engine's process ended, exit code {self._process.exitcode}"
            ) from error
        if isinstance(answer, str):
            raise EngineError(answer)
        return answer


def _serve(
    connection: multiprocessing.connection.Connection, engine_dir: str, config: dict[str, Any]
) -> None:
    """The child: answers until the connection closes."""
    try:
        engine = OfflineEngine(Path(engine_dir), EngineConfig(**config))
    except LooptrtError as error:
        connection.send(str(error))
        return
    try:
        connection.send((engine.manifest.to_json(), engine.facts))
        while True:
            connection.send(engine.answer(*connection.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent has left
    finally:
        engine.close()


@contextmanager
def offline(engine_dir: Path, config: EngineConfig, *, in_process: bool) -> Iterator[Engine]:
    """A running engine, closed at the end of the block."""
    start = OfflineEngine if in_process else OfflineProcess
    engine = start(engine_dir, config)
    try:
        yield engine
    finally:
        engine.close()
