"""Endpoints under test: the real server on a loopback port, on a thread or as a process."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from looptrt.runtime.llm import LLM
from looptrt.runtime.openai.server import Server, ServerConfig, bind, url_of
from tests.support.scripted import DEADLINE_S

MODEL = "tiny"
_PROGRAM = "import sys; from looptrt.cli import main; sys.exit(main())"


@dataclass
class Endpoint:
    """A running server.

    Attributes:
        url: its root.
        llm: what answers; None for a server in a process of its own.
    """

    url: str
    llm: LLM | None = None
    server: Server | None = None
    process: subprocess.Popen[str] | None = None

    def client(self, **fields: Any) -> openai.OpenAI:
        """The public client, which does not try again."""
        settings = {"api_key": "none", "max_retries": 0, "timeout": DEADLINE_S, **fields}
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """One call without the client's help."""
        values = {"model": MODEL, **body}
        return httpx.post(f"{self.url}/v1/{path}", json=values, timeout=DEADLINE_S)

    def figure(self, name: str, **labels: str) -> float:
        """A value of /metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=DEADLINE_S).text
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and wanted <= set(
                head[:-1].split("{")[-1].split(",")
            ):
                return float(value)
        raise AssertionError(f"{name} {labels} is not in\n{text}")


@contextlib.contextmanager
def serving(llm: LLM, **config: Any) -> Iterator[Endpoint]:
    """A server on a thread, over an LLM that stays the caller's."""
    settings = ServerConfig(**{"model": MODEL, "drain_timeout_s": DEADLINE_S, **config})
    sock = bind("127.0.0.1", 0, io_timeout_s=settings.io_timeout_s)
    ready = threading.Event()
    server = Server(llm, settings, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    url = url_of(sock)
    thread.start()
    try:
        assert ready.wait(DEADLINE_S)
        yield Endpoint(url, llm, server)
    finally:
        server.drain()
        thread.join(2 * DEADLINE_S)
        assert not thread.is_alive()


@contextlib.contextmanager
def serving_process(engine_dir: Path, *flags: str, program: str = _PROGRAM) -> Iterator[Endpoint]:
    """`looptrt serve` as a person starts it, or by a program that does more."""
    command = [
        *(sys.executable, "-c", program),
        *("serve", str(engine_dir), "--port", "0", "--served_model_name", MODEL, *flags),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=None, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(f"looptrt serve: {MODEL} at http://"), line
        yield Endpoint(line.split()[-1], process=process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
        assert process.stdout is not None
        process.stdout.close()
