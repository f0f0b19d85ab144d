"""The routes: a body in, a reply out.

Owns which path does what and the order of checks; leaves each step to its module. Invariant:
nothing is queued in the engine before the whole body was checked.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from looptrt import __version__
from looptrt.errors import LooptrtError, RequestError
from looptrt.runtime.admission import EncodedPrompt
from looptrt.runtime.llm import LLM
from looptrt.runtime.metrics import Family
from looptrt.runtime.openai.bodies import Asked, ChatBody, CompletionBody
from looptrt.runtime.openai.encoding import json_bytes
from looptrt.runtime.openai.events import ClientGone, event_stream, until_gone, whole_outputs
from looptrt.runtime.openai.faults import ApiFault, fault_of, unknown_model
from looptrt.runtime.openai.prometheus import CONTENT_TYPE, prometheus_text
from looptrt.runtime.openai.replies import ChatReply, CompletionReply, Reply

_CLIENT_CLOSED = 499  # nobody reads it
COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
PATHS = (COMPLETIONS, CHAT, MODELS, "/health", "/version", "/metrics")


@dataclass(frozen=True)
class Service:
    """What the routes serve.

    Attributes:
        llm: answers.
        model: its name here.
        max_body_bytes: of a request.
        io_timeout_s: how long a client may take over a body.
    """

    llm: LLM
    model: str
    max_body_bytes: int
    io_timeout_s: float

    async def complete(self, request: Request) -> Response:
        """`/v1/completions`."""
        # Bodies can be long: other clients need not wait while one is read and encoded.
        prompts, asked = await asyncio.to_thread(self._completion, await self._body(request))
        reply = CompletionReply(asked, self.model, self.llm.tokenizer)
        return await self._answer(request, prompts, asked, reply)

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        prompts, asked = await asyncio.to_thread(self._chat, await self._body(request))
        reply = ChatReply(asked, self.model, self.llm.tokenizer)
        return await self._answer(request, prompts, asked, reply)

    def described(self, created: int) -> dict[str, Any]:
        """The served model as OpenAI describes one."""
        limits = self.llm.limits
        return {
            "id": self.model,
            "object": "model",
            "created": created,
            "owned_by": "looptrt",
            "max_model_len": limits.max_seq_len,
            "max_input_len": limits.max_input_len,
        }

    async def _answer(
        self, request: Request, prompts: Sequence[EncodedPrompt], asked: Asked, reply: Reply
    ) -> Response:
        streams = self.llm.generate_all_async(prompts, asked.params)
        if asked.stream:
            return await event_stream(request.receive, streams, reply)
        outputs = await until_gone(request.receive, whole_outputs(streams))
        # Strings of log-probabilities can be many; other clients need not wait for them.
        return await asyncio.to_thread(lambda: _json(reply.whole(outputs)))

    def _completion(self, content: bytes) -> tuple[list[EncodedPrompt], Asked]:
        body = CompletionBody.of(_parsed(content))
        self._check_model(body.model)
        asked, prompts = body.asked(self.llm.manifest.spec.vocab_size), body.prompts()
        self._check_count(len(prompts), asked)
        return [self.llm.encode(prompt) for prompt in prompts], asked

    def _chat(self, content: bytes) -> tuple[list[EncodedPrompt], Asked]:
        body = ChatBody.of(_parsed(content))
        self._check_model(body.model)
        asked, messages = body.asked(self.llm.manifest.spec.vocab_size), body.conversation()
        self._check_count(1, asked)
        thinking = body.enable_thinking()
        return [self.llm.encode_chat(messages, enable_thinking=thinking)], asked

    def _check_model(self, name: str) -> None:
        if name != self.model:
            raise unknown_model(name, self.model)

    def _check_count(self, num_prompts: int, asked: Asked) -> None:
        most, n = self.llm.config.max_waiting, asked.params.n
        if num_prompts * n > most:
            raise RequestError(
                f"prompt: {num_prompts} prompts with n {n} are {num_prompts * n} answers, "
                f"expected at most max_waiting {most}"
            )

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self.io_timeout_s):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self.max_body_bytes:
                        raise ApiFault(
                            f"body: more than {self.max_body_bytes} bytes",
                            status=413,
                            headers={"Connection": "close"},
                        )
        except TimeoutError:
            raise ApiFault(
                f"the body did not come within {self.io_timeout_s:g} s", status=408
            ) from None
        return bytes(body)


def make_app(
    service: Service, *, is_draining: Callable[[], bool], further: Callable[[], Family]
) -> FastAPI:
    """The application.

    Args:
        service: what it serves.
        is_draining: whether the server takes nothing new.
        further: a family to show beside the engine's.
    """
    app = FastAPI(title="looptrt", version=__version__, docs_url=None, redoc_url=None)
    created, scraping = int(time.time()), asyncio.Lock()
    app.post(COMPLETIONS, openapi_extra=_documented(CompletionBody))(service.complete)
    app.post(CHAT, openapi_extra=_documented(ChatBody))(service.chat)

    @app.get(MODELS)
    async def models() -> Response:
        return _json({"object": "list", "data": [service.described(created)]})

    @app.get(MODELS + "/{name:path}")
    async def model(name: str) -> Response:
        if name != service.model:
            raise unknown_model(name, service.model)
        return _json(service.described(created))

    @app.get("/health")
    async def health() -> Response:
        if is_draining():
            return _json({"status": "draining"}, 503)
        service.llm.check_alive()
        return _json({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        labels = {"model": service.model, "version": "1"}
        async with scraping:  # it waits for a step to end: scrapes must not take all threads
            families = await asyncio.to_thread(service.llm.metrics, labels)
        text = prometheus_text([*families, further()])
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    _handle_errors(app)
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(LooptrtError)
    async def failed(_request: Request, error: LooptrtError) -> Response:
        return fault_of(error).response()

    @app.exception_handler(HTTPException)
    async def not_found(_request: Request, error: HTTPException) -> Response:
        fault = ApiFault(str(error.detail), status=error.status_code)
        return fault.response()

    @app.exception_handler(ClientGone)
    @app.exception_handler(ClientDisconnect)
    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED)

    @app.exception_handler(Exception)
    async def broken(_request: Request, _error: Exception) -> Response:
        fault = ApiFault("internal error; see the server's log", status=500, kind="server_error")
        return fault.response()


def _parsed(content: bytes) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ApiFault(f"body: not valid JSON: {error}", status=400) from None


def _documented(body: type[CompletionBody | ChatBody]) -> dict[str, Any]:
    content = {"application/json": {"schema": body.model_json_schema()}}
    return {"requestBody": {"content": content, "required": True}}


def _json(value: object, status: int = 200) -> Response:
    return Response(json_bytes(value), status, media_type="application/json")
