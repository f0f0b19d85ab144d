"""The server's life: a socket, a loop, the end on a signal.

Owns binding, draining and exit; leaves requests to `app` and `front`. Invariant: after the
first SIGTERM or SIGINT nothing new begins, and `Server.run` returns within the drain timeout
and a few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn

from looptrt.errors import EngineError
from looptrt.runtime.llm import LLM
from looptrt.runtime.openai.app import PATHS, Service, make_app
from looptrt.runtime.openai.front import Front

_LINGER_S = 5  # for connections whose last bytes are on their way
_BACKLOG = 2048

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of a server.

    Args:
        model: name that requests give.
        api_key: what requests must bear; None lets everyone in.
        max_body_bytes: of a request.
        io_timeout_s: how long a client may take over a body, and leave sent bytes unread.
        drain_timeout_s: how long running requests may go on after the end was asked for.

    Raises:
        EngineError: a value is out of range; names the field.
    """

    model: str
    api_key: str | None = None
    max_body_bytes: int = 16 * 2**20
    io_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.model or not self.model.isprintable():
            raise EngineError(f"served_model_name: expected a name, got {self.model!r:.80}")
        key = self.api_key
        # A header's value is stripped: a key with blanks around it would let no one in.
        if key is not None and not (
            key.isascii() and key.isprintable() and key.strip() == key != ""
        ):
            raise EngineError("api_key: expected printable ASCII without blanks around it")
        if self.max_body_bytes < 1:
            raise EngineError(f"max_body_bytes: expected at least 1, got {self.max_body_bytes}")
        if not 0.1 <= self.io_timeout_s <= 86_400:
            raise EngineError(f"io_timeout: expected 0.1 to 86400 s, got {self.io_timeout_s:g}")
        if not 0 <= self.drain_timeout_s <= 86_400:
            raise EngineError(f"drain_timeout: expected 0 to 86400 s, got {self.drain_timeout_s:g}")


def bind(host: str, port: int, *, io_timeout_s: float) -> socket.socket:
    """Take an address; clients are refused until the server listens.

    Connections whose client does not read for `io_timeout_s` are reset by the system, so that
    nobody holds an answer for ever.

    Raises:
        EngineError: the address cannot be taken.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            timeout_ms = int(io_timeout_s * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
            sock.bind(address)
            stack.pop_all()
            return sock
    except (OSError, OverflowError) as error:
        raise EngineError(f"host {host}, port {port}: {error}") from None


def url_of(sock: socket.socket) -> str:
    """The address of a bound socket as a URL."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """One endpoint over one LLM.

    Args:
        llm: answers; still the caller's to shut down.
        config: settings.
        on_ready: called once requests are taken.
    """

    def __init__(
        self, llm: LLM, config: ServerConfig, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        service = Service(llm, config.model, config.max_body_bytes, config.io_timeout_s)
        app = make_app(
            service,
            is_draining=lambda: self.front.is_draining,
            further=lambda: self.front.family(),
        )
        self.front = Front(app, api_key=config.api_key, paths=PATHS)
        super().__init__(
            uvicorn.Config(
                self.front,
                log_config=None,
                access_log=False,
                lifespan="off",
                http="h11",  # limits the size of headers
                ws="none",
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_LINGER_S,
            )
        )
        self._llm = llm
        self._drain_timeout_s = config.drain_timeout_s
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second one ends."""
        if self.front.is_draining or self._loop is None:
            self.force_exit = self.should_exit = True
        else:
            self.drain()

    def drain(self) -> None:
        """Finish what runs and end, from any thread. Harmless when draining or after the end."""
        self.front.is_draining = True
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        _logger.info("draining: %d requests run", self.front.num_running)
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                await self.front.idle.wait()
        except TimeoutError:
            _logger.warning(
                "%d requests did not end within drain_timeout %g s; they are cut off",
                self.front.num_running,
                self._drain_timeout_s,
            )
            await asyncio.to_thread(self._llm.shutdown)
        self.should_exit = True
