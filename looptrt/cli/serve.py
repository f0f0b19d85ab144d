"""`looptrt serve`: the OpenAI-compatible endpoint over an engine directory."""

from __future__ import annotations

import argparse
import gc
import logging
import os
from pathlib import Path

from looptrt.cli.engine_options import add_engine_options, engine_config
from looptrt.cli.guard import ended_by_signals
from looptrt.cli.terminal import Commands, byte_count
from looptrt.errors import LooptrtError

_API_KEY = "LOOPTRT_API_KEY"


def add_parser(commands: Commands) -> None:
    """Declare `looptrt serve`."""
    parser = commands.add_parser(
        "serve", help="answer over HTTP as OpenAI does", allow_abbrev=False
    )
    parser.description = (
        "Serve an engine directory over HTTP: /v1/completions, /v1/chat/completions, /v1/models, "
        "/health, /version, /metrics (see docs/serve.md). SIGTERM or Ctrl-C finishes what runs "
        "and ends with exit code 0; a second one ends at once."
    )
    parser.set_defaults(command=run)
    parser.add_argument("engine_dir", type=Path, metavar="ENGINE_DIR")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0 takes a free one (default: 8000)"
    )
    parser.add_argument(
        "--api_key",
        "--api-key",
        metavar="KEY",
        help=f"what requests to /v1 must bear (default: ${_API_KEY}, else none)",
    )
    parser.add_argument(
        "--served_model_name",
        "--served-model-name",
        metavar="NAME",
        help="what requests call the model (default: the directory's name)",
    )
    parser.add_argument(
        "--drain_timeout",
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="how long requests may go on after SIGTERM (default: 30)",
    )
    parser.add_argument(
        "--io_timeout",
        "--io-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="how long a client may take over a body or leave bytes unread (default: 60)",
    )
    parser.add_argument(
        "--max_body_bytes",
        "--max-body-bytes",
        type=byte_count,
        default=16 * 2**20,
        metavar="SIZE",
        help="of a request (default: 16MiB)",
    )
    add_engine_options(parser)
    parser.add_argument(
        "--log_level",
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least severe message shown (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    # The HTTP stack is an extra: no other command should need or load it.
    try:
        from looptrt.runtime.openai import server as http  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise LooptrtError(f"serve: {error}; install looptrt[serve]") from None
    from looptrt.runtime.llm import LLM  # noqa: PLC0415

    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    config = http.ServerConfig(
        model=args.served_model_name or args.engine_dir.resolve().name,
        api_key=args.api_key if args.api_key is not None else os.environ.get(_API_KEY),
        max_body_bytes=args.max_body_bytes,
        io_timeout_s=args.io_timeout,
        drain_timeout_s=args.drain_timeout,
    )
    engine = engine_config(args)
    sock = http.bind(args.host, args.port, io_timeout_s=config.io_timeout_s)
    url = http.url_of(sock)

    def tell() -> None:
        # What is loaded stays: full collections that look at it stop all streams for 0.07 s.
        gc.collect()
        gc.freeze()
        print(f"looptrt serve: {config.model} at {url}", flush=True)

    with sock, ended_by_signals(), LLM(args.engine_dir, engine) as llm:
        http.Server(llm, config, tell).run(sockets=[sock])
    return 0
