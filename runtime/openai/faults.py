"""Errors as OpenAI's clients expect them: a status and a JSON object.

Owns which error gets which status; leaves raising to everyone else. Invariant: a client never
sees a traceback, and every refusal says what to change.
"""

from __future__ import annotations

import re
from typing import Any

from starlette.responses import Response

from looptrt.errors import EngineError, LooptrtError, QueueFullError, RequestError
from looptrt.runtime.openai.encoding import json_bytes

_INVALID = "invalid_request_error"
_RETRY_AFTER_S = "1"
_FIELD = re.compile(r"(\w+)(\[\d+\])*(\.\w+)*: ")


class ApiFault(LooptrtError):
    """An error with its place in HTTP.

    Attributes:
        status: HTTP status.
        kind, param, code: `type`, `param` and `code` of OpenAI's error object.
        headers: of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        kind: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}

    def to_json(self) -> dict[str, Any]:
        """OpenAI's error object."""
        about = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": about}

    def response(self) -> Response:
        """The whole response."""
        return Response(
            json_bytes(self.to_json()), self.status, self.headers, media_type="application/json"
        )


def fault_of(error: LooptrtError) -> ApiFault:
    """The status of an error of ours."""
    match error:
        case ApiFault():
            return error
        case QueueFullError():
            return ApiFault(
                str(error),
                status=429,
                kind="requests",
                code="rate_limit_exceeded",
                headers={"Retry-After": _RETRY_AFTER_S},
            )
        case RequestError():
            field = _FIELD.match(str(error))
            return ApiFault(str(error), status=400, param=field[1] if field else None)
        case EngineError():
            return ApiFault(str(error), status=503, kind="server_error", code="engine_ended")
        case _:
            return ApiFault(str(error), status=500, kind="server_error")


def unauthorized() -> ApiFault:
    """The key is missing or wrong."""
    return ApiFault(
        "Incorrect API key provided; send it as `Authorization: Bearer KEY`",
        status=401,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def draining() -> ApiFault:
    """The server finishes what runs and takes nothing new."""
    return ApiFault(
        "the server is shutting down",
        status=503,
        kind="server_error",
        code="shutting_down",
        headers={"Retry-After": _RETRY_AFTER_S, "Connection": "close"},
    )


def unknown_model(name: str, served: str) -> ApiFault:
    """Another model than the one that is served."""
    return ApiFault(
        f"model: {name!r:.200} is not served here; this server has {served!r}",
        status=404,
        param="model",
        code="model_not_found",
    )
