"""The engine's side of a connection: requests in, steps, tokens out, until the client goes.

Owns the loop around an EngineCore, in a process of its own (`python -m`) or on a thread;
leaves text and callers to `engine_client`. Invariant: whatever ends the loop, the client
hears of it, by a message or by the end of the connection.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import logging
import queue
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from looptrt.errors import EngineError, LooptrtError, RequestError
from looptrt.manifest import Manifest
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.outputs import StepOutput
from looptrt.runtime.protocol import (
    AbortRequest,
    AddRequest,
    Connection,
    EngineFailed,
    GetStats,
    Message,
    Ready,
    RequestRefused,
    Shutdown,
    Stats,
    Worker,
    parts_of,
)
from looptrt.runtime.request import FinishReason, Request

if TYPE_CHECKING:
    from looptrt.runtime.engine_core import EngineCore

_IDLE_WAIT_S = 5.0

_Inbox = queue.SimpleQueue[Message | LooptrtError | None]  # None: the client has left

_logger = logging.getLogger(__name__)


class Core(Protocol):
    """What the loop needs of an engine; `EngineCore` is the one in the product."""

    @property
    def manifest(self) -> Manifest:
        """The engine directory's manifest."""

    def add_request(self, request: Request) -> None:
        """Queue a request, or raise RequestError."""

    def abort_request(self, request_id: int, reason: FinishReason) -> None:
        """End a request for this reason; unknown ids are harmless."""

    def has_work(self) -> bool:
        """Whether `step` would do or report anything."""

    def step(self) -> StepOutput:
        """Run one step."""

    def stats(self) -> dict[str, int | float]:
        """Figures by name; `num_units` is what requests may own of the KV pool."""

    def close(self) -> None:
        """Release everything."""


def load_core(engine_dir: Path, config: EngineConfig) -> EngineCore:
    """Load an engine; torch is imported here, so that clients of a process never need it."""
    module: Any = importlib.import_module("looptrt.runtime.engine_core")
    core: EngineCore = module.EngineCore(engine_dir, config)
    return core


def serve(make_core: Callable[[], Core], connection: Connection) -> bool:
    """Run an engine until its client leaves or asks it to stop.

    Returns:
        Whether it ended as asked; False after a failure, which the client was told.
    """
    inbox: _Inbox = queue.SimpleQueue()
    reader = Worker("looptrt-inbox", _read_all, connection, inbox)
    reader.start()
    try:
        _run(make_core, connection, inbox)
    except LooptrtError as error:
        _report(connection, error)
        return False
    except Exception as error:  # the one supervisor of the engine
        _logger.exception("the engine failed")
        _report(connection, EngineError(f"the engine failed: {type(error).__name__}: {error}"))
        return False
    finally:
        connection.hang_up()
        reader.join()
        connection.close()
    return True


def _read_all(connection: Connection, inbox: _Inbox) -> None:
    """Empty the socket at all times, so that no client waits for a step to end."""
    try:
        while (message := connection.receive()) is not None:
            inbox.put(message)
    except LooptrtError as error:
        inbox.put(error)
    finally:
        inbox.put(None)


def _run(make_core: Callable[[], Core], connection: Connection, inbox: _Inbox) -> None:
    core = make_core()
    try:
        connection.send(Ready(core.manifest.to_json(), int(core.stats()["num_units"])))
        while _take_messages(core, connection, inbox):
            if core.has_work():
                # Sent even when it is empty: the client takes silence for a hang.
                for part in parts_of(core.step()):
                    connection.send(part)
    finally:
        core.close()


def _take_messages(core: Core, connection: Connection, inbox: _Inbox) -> bool:
    """Act on all messages that are there, waiting for one if there is no other work."""
    try:
        message = inbox.get(block=not core.has_work(), timeout=_IDLE_WAIT_S)
        while _act(core, connection, message):
            message = inbox.get_nowait()
    except queue.Empty:
        return True
    return False


def _act(core: Core, connection: Connection, message: Message | LooptrtError | None) -> bool:
    """Act on one message; False when the engine is to stop."""
    match message:
        case AddRequest(request):
            try:
                core.add_request(request)
            except RequestError as error:
                connection.send(RequestRefused(request.request_id, error))
        case AbortRequest(request_id, reason):
            core.abort_request(request_id, reason)
        case GetStats(call_id):
            connection.send(Stats(call_id, core.stats()))
        case Shutdown() | None:
            return False
        case LooptrtError():
            raise message  # what the client sends cannot be read any more
        case _:
            raise EngineError(f"unexpected message from the client: {message!r}")
    return True


def _report(connection: Connection, error: LooptrtError) -> None:
    try:
        connection.send(EngineFailed(error))
    except LooptrtError:
        _logger.info("no client is left to hear: %s", error)


def main(argv: list[str] | None = None) -> int:
    """Serve one client over an inherited socket; the exit code is 0 after a clean end."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's to handle
    parser = argparse.ArgumentParser(
        prog="looptrt.runtime.engine_process", description=main.__doc__
    )
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the socket")
    parser.add_argument("--engine-dir", type=Path, required=True)
    parser.add_argument("--config", type=json.loads, required=True, help="EngineConfig as JSON")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sock = socket.socket(fileno=args.fd)
    sock.set_inheritable(False)
    config = EngineConfig(**args.config)

    def make_core() -> EngineCore:
        core = load_core(args.engine_dir, config)
        # What is loaded stays: a full collection that looks at it stops the engine for 0.1 s.
        gc.collect()
        gc.freeze()
        return core

    return 0 if serve(make_core, Connection(sock)) else 1


if __name__ == "__main__":
    sys.exit(main())
