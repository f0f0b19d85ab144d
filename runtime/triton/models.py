"""The Python models of the repository as the server sees them, behind their `model.py` files.

Owns start and end of each model and what reaches the server's log; leaves requests to
`service`, `text_models` and `bls`. Invariant: a model that cannot start says why, to the log
and to the server, and leaves nothing behind.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from looptrt.errors import EngineError, LooptrtError
from looptrt.runtime.engine_client import ProcessClient
from looptrt.runtime.llm import LLM
from looptrt.runtime.triton.bls import BlsService, Models
from looptrt.runtime.triton.channel import Code, Server, ServerModule, ServerObject, code_of
from looptrt.runtime.triton.requests import Inputs
from looptrt.runtime.triton.responses import Outputs
from looptrt.runtime.triton.server_metrics import ServerMetrics
from looptrt.runtime.triton.service import Service
from looptrt.runtime.triton.settings import Settings
from looptrt.runtime.triton.text_models import Postprocessing, Preprocessing

_logger = logging.getLogger(__name__)


class LlmModel:
    """`tensorrt_llm`: an engine process of its own, and the service in front of it.

    Args:
        module: `triton_python_backend_utils`.
        args: what the server gives to `initialize`.

    Raises:
        TritonModelException: the engine cannot start; with `lazy_load` the failure is kept for
            `is_ready` and the requests instead.
    """

    def __init__(self, module: ServerModule, args: Mapping[str, str]) -> None:
        _log_to(module)
        self._server = Server(module)
        self._args = args
        self._service: Service | None = None
        self._metrics: ServerMetrics | None = None
        self._failure: str | None = None
        self._loader: threading.Thread | None = None
        with _explained(module):
            self._settings = Settings.of_model(args)
            if self._settings.flag("lazy_load", default=False):
                self._loader = threading.Thread(target=self._load_later, name="looptrt-load")
                self._loader.start()
            else:
                self._load()

    def execute(self, requests: Sequence[ServerObject]) -> None:
        """Admit requests; their responses come later."""
        for request in requests:
            channel = self._server.channel(request)
            if self._service is None:
                channel.fail(Code.UNAVAILABLE, self._failure or "the engine is being loaded")
                continue
            timeout_s = request.timeout() / 1e6
            inputs = self._server.inputs(request)
            try:
                self._service.take(inputs, channel, request.request_id(), timeout_s)
            except Exception as error:  # one request must not take the model with it
                _logger.exception("a request failed")
                channel.fail(Code.INTERNAL, f"{type(error).__name__}: {error}")

    def is_ready(self) -> bool:
        """Whether the engine is loaded and alive; asked by servers from 26.03 on."""
        return self._service is not None and self._service.is_alive

    def finalize(self) -> None:
        """End everything."""
        if self._loader is not None:
            self._loader.join()
        if self._metrics is not None:
            self._metrics.close()
        if self._service is not None:
            self._service.close()

    def _load(self) -> None:
        settings = self._settings
        engine_dir, config = settings.engine_dir("engine_dir"), settings.engine_config()
        excludes_input = settings.flag("exclude_input_in_output", default=False)
        drain_file = settings.text("drain_file")
        client = ProcessClient(engine_dir, config, _python(settings))
        llm = LLM.over(client, engine_dir, config)
        labels = {"model": self._args["model_name"], "version": self._args["model_version"]}
        try:
            self._metrics = ServerMetrics(self._server.module, llm, labels)
            self._service = Service(
                llm,
                excludes_input=excludes_input,
                is_decoupled=settings.decoupled,
                drain_file=None if drain_file is None else Path(drain_file),
            )
        except BaseException:
            llm.shutdown()
            raise
        _logger.info("serving %s, engine process %d", engine_dir, client.pid)

    def _load_later(self) -> None:
        try:
            self._load()
        except Exception as error:  # is_ready and every request tell of it
            _logger.exception("the engine cannot start")
            self._failure = str(error)


class TextModel:
    """`preprocessing` or `postprocessing`: a response for every request, at once.

    Args:
        module: `triton_python_backend_utils`.
        make: makes what turns inputs into outputs.
        calls: to end the engine's request behind a piece of text whose caller has gone: an
            ensemble tells the step that comes next of it, and no other.
    """

    def __init__(
        self,
        module: ServerModule,
        make: Callable[[], Preprocessing | Postprocessing],
        calls: Models | None = None,
    ) -> None:
        _log_to(module)
        self._server = Server(module)
        self._calls = calls
        with _explained(module):
            self._run: Callable[[Inputs], Outputs] = make().run

    def execute(self, requests: Sequence[ServerObject]) -> list[ServerObject]:
        """A response for each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: ServerObject) -> ServerObject:
        try:
            inputs = self._server.inputs(request)
            key = inputs["STOP_KEY"].item() if "STOP_KEY" in inputs else b""
            if self._calls is not None and key and request.is_cancelled():
                self._calls.stop(key.decode())
            return self._server.response(self._run(inputs))
        except LooptrtError as error:
            return self._server.error(code_of(error), str(error))
        except Exception as error:  # one request must not take the model with it
            _logger.exception("a request failed")
            return self._server.error(Code.INTERNAL, f"{type(error).__name__}: {error}")


class BlsModel:
    """`tensorrt_llm_bls`.

    Args:
        module: `triton_python_backend_utils`.
        args: what the server gives to `initialize`.

    Raises:
        TritonModelException: a parameter is wrong.
    """

    def __init__(self, module: ServerModule, args: Mapping[str, str]) -> None:
        _log_to(module)
        self._server = Server(module)
        with _explained(module):
            settings = Settings.of_model(args)
            llm = settings.text("tensorrt_llm_model_name") or "tensorrt_llm"
            self._service = BlsService(
                Models(module, llm, is_decoupled=settings.decoupled),
                max_requests=settings.count("bls_max_requests", default=256),
                accumulates=settings.flag("accumulate_tokens", default=False),
            )

    def execute(self, requests: Sequence[ServerObject]) -> None:
        """Start requests; their responses come later."""
        for request in requests:
            channel = self._server.channel(request)
            self._service.take(self._server.inputs(request), channel, request.timeout())

    def finalize(self) -> None:
        """End everything."""
        self._service.close()


def preprocessing(module: ServerModule, args: Mapping[str, str]) -> TextModel:
    """The model of that name."""
    return TextModel(
        module, lambda: Preprocessing(Settings.of_model(args).engine_dir("tokenizer_dir"))
    )


def postprocessing(module: ServerModule, args: Mapping[str, str]) -> TextModel:
    """The model of that name."""

    def make() -> Postprocessing:
        settings = Settings.of_model(args)
        skips = settings.flag("skip_special_tokens", default=True)
        return Postprocessing(settings.engine_dir("tokenizer_dir"), skip_special_tokens=skips)

    return TextModel(module, make, Models(module, "tensorrt_llm", is_decoupled=True))


def _python(settings: Settings) -> str:
    """The interpreter of the engine process."""
    python = settings.text("engine_python") or shutil.which("python3")
    if python is None:
        raise EngineError("parameter engine_python: expected the interpreter that has torch")
    return python


class _explained:
    """Turns our errors into the server's, which names the model and prints the text."""

    def __init__(self, module: ServerModule) -> None:
        self._module = module

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, LooptrtError):
            raise self._module.TritonModelException(str(error)) from error


class _ServerLog(logging.Handler):
    """Passes messages of ours to the server's log."""

    def __init__(self, module: ServerModule) -> None:
        super().__init__()
        self._log = module.Logger

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        text = f"{record.name}: {self.format(record)}"
        if record.levelno >= logging.ERROR:
            self._log.log_error(text)
        elif record.levelno >= logging.WARNING:
            self._log.log_warn(text)
        else:
            self._log.log_info(text)


def _log_to(module: ServerModule) -> None:
    ours = logging.getLogger("looptrt")
    ours.handlers[:] = [_ServerLog(module)]
    ours.setLevel(logging.INFO)
    ours.propagate = False
