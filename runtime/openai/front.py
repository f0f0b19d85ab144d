"""What is around every request: the key, the end of service, and the count of responses.

Owns whether a request gets in at all; leaves what it asks to `app`. Invariant: `idle` is set
exactly while no API request runs.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from looptrt.runtime.metrics import Family, Kind, Sample
from looptrt.runtime.openai.faults import ApiFault, draining, unauthorized

API_PREFIX = "/v1/"


class Front:
    """Wraps the application.

    Args:
        app: what answers.
        api_key: what `/v1/` needs as a bearer token; None lets everyone in.
        paths: paths that are counted by name; all others are `other`.

    Attributes:
        is_draining: set it to refuse further API requests; those that run go on.
        idle: set while no API request runs.
        num_running: API requests that run.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, paths: Iterable[str]) -> None:
        self.is_draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.num_running = 0
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()
        self._paths = frozenset(paths)
        self._counts: Counter[tuple[str, int]] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        app, is_api = self._app, path.startswith(API_PREFIX)
        fault = self._fault(scope) if is_api else None
        if fault is not None:
            app = fault.response()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = path if path in self._paths else "other"
                self._counts[name, message["status"]] += 1
            await send(message)

        if is_api and fault is None:
            await self._run(app, scope, receive, counted)
        else:
            await app(scope, receive, counted)

    def family(self) -> Family:
        """Responses by path and status."""
        samples = (
            Sample({"path": path, "status": str(status)}, float(count))
            for (path, status), count in sorted(self._counts.items())
        )
        name, text = "looptrt_http_responses_total", "HTTP responses by path and status"
        return Family(name, Kind.COUNTER, text, tuple(samples))

    def _fault(self, scope: Scope) -> ApiFault | None:
        """Why a request does not get in."""
        if self._expected is not None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                return unauthorized()
        return draining() if self.is_draining else None

    async def _run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_running += 1
        self.idle.clear()
        try:
            await app(scope, receive, send)
        finally:
            self.num_running -= 1
            if self.num_running == 0:
                self.idle.set()
