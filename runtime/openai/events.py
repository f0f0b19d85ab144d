"""Answers on their way out: merged, watched for a client that leaves, as server-sent events.

Owns what happens to requests when a client goes; leaves shapes to `replies`. Invariant: when a
response ends, however it ends, none of its requests is left in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from looptrt.errors import LooptrtError
from looptrt.runtime.llm import AsyncAnswerStream
from looptrt.runtime.openai.encoding import json_bytes
from looptrt.runtime.openai.faults import fault_of
from looptrt.runtime.openai.replies import Reply
from looptrt.runtime.outputs import RequestOutput

_Result = TypeVar("_Result")
_DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has closed the connection; its requests are aborted."""


async def until_gone(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Do something for a client, unless it leaves before: then the work is cancelled.

    Raises:
        ClientGone: the client left first.
    """
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def merged(
    streams: Sequence[AsyncAnswerStream],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several answers as they come, each with the number of its stream.

    An output waits until it is taken; a stream then gives all that came meanwhile in one.

    Raises:
        LooptrtError: of the first stream that fails; the others are aborted.
    """
    inbox: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(1)

    async def pump(index: int, stream: AsyncAnswerStream) -> None:
        try:
            async for output in stream:
                await inbox.put((index, output))
        except Exception as error:  # noqa: BLE001 - raised where the outputs are taken
            await inbox.put((index, error))

    tasks = [asyncio.ensure_future(pump(*entry)) for entry in enumerate(streams)]
    num_open = len(streams)
    try:
        while num_open:
            index, arrival = await inbox.get()
            if isinstance(arrival, Exception):
                raise arrival
            num_open -= arrival.finished
            yield index, arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def whole_outputs(streams: Sequence[AsyncAnswerStream]) -> list[RequestOutput]:
    """The finished outputs of all streams, in their order."""
    last: dict[int, RequestOutput] = {}
    outputs = merged(streams)
    try:
        async for index, output in outputs:
            last[index] = output
    finally:
        await outputs.aclose()
    return [last[index] for index in range(len(streams))]


async def events_of(
    streams: Sequence[AsyncAnswerStream], reply: Reply
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of a reply, `[DONE]` last.

    Raises:
        LooptrtError: nothing was shown yet; later errors are events.
    """
    outputs, has_begun = merged(streams), False
    try:
        async for index, output in outputs:
            for chunk in reply.chunks(index, output):
                has_begun = True
                yield _event(chunk)
        if (usage := reply.last_chunk()) is not None:
            yield _event(usage)
    except LooptrtError as error:
        if not has_begun:
            raise
        yield _event(fault_of(error).to_json())
    finally:
        await outputs.aclose()
    yield _DONE


class EventStream(Response):
    """Sends events as they come, as fast as the client reads them.

    Args:
        first: an event that is there already.
        rest: those that follow; closed in any case.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(status_code=200, headers={"Cache-Control": "no-cache"})
        self.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        del self.headers["Content-Length"]
        self._first = first
        self._rest = rest

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client leaves."""
        try:
            await until_gone(receive, self._send(send))
        except ClientGone:
            return
        finally:
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send(_part(self._first))
        async for event in self._rest:
            await send(_part(event))
        await send(_part(b"", is_last=True))


async def event_stream(
    receive: Receive, streams: Sequence[AsyncAnswerStream], reply: Reply
) -> EventStream:
    """A response that streams; returns once there is something to stream.

    Raises:
        LooptrtError: there never was; the response can still have a status of its own.
        ClientGone: the client left before.
    """
    events = events_of(streams, reply)
    try:
        first = await until_gone(receive, _next(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)


async def _next(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(value: object) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def _part(body: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}
