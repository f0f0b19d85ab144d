"""`looptrt triton`: an engine directory behind Triton Inference Server."""

from __future__ import annotations

import argparse
import dataclasses
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from looptrt.cli.engine_options import add_engine_options, engine_config
from looptrt.cli.terminal import Commands
from looptrt.errors import LooptrtError
from looptrt.runtime.triton.launcher import (
    CONTROL_MODES,
    LOG_LEVELS,
    ServerOptions,
    check_ports,
    drain_file,
    run_server,
)
from looptrt.runtime.triton.repository import RepositoryOptions, write_repository
from looptrt.runtime.triton.server_env import find_server, install_server

_TEMPLATE_SWITCHES = (
    ("decoupled_mode", "several responses a request, for streams (default: yes)"),
    ("exclude_input_in_output", "answers without their prompt, unless asked (default: yes)"),
    ("skip_special_tokens", "texts without special tokens (default: yes)"),
    ("accumulate_tokens", "a BLS stream repeats the text so far (default: no)"),
    ("lazy_load", "answer while the engine loads; servers from 26.03 on (default: no)"),
)


def add_parser(commands: Commands) -> None:
    """Declare `looptrt triton`."""
    parser = commands.add_parser(
        "triton", help="serve through Triton Inference Server", allow_abbrev=False
    )
    parser.description = (
        "Fill the model repository's templates and run a tritonserver on it, in the foreground. "
        "The server is the one of --tritonserver, else one on PATH, else the one that "
        "--install_server has put into the user's cache directory."
    )
    parser.set_defaults(command=run)
    parser.add_argument("--engine_dir", type=Path, metavar="DIR", help="from looptrt build")
    parser.add_argument(
        "--model_repo", type=Path, metavar="DIR", help="only write the filled templates there"
    )
    parser.add_argument(
        "--install_server", action="store_true", help="only install the server from wheels"
    )
    server = parser.add_argument_group("server")
    server.add_argument("--tritonserver", type=Path, metavar="PROGRAM")
    server.add_argument("--server_env", type=Path, metavar="DIR", help="of --install_server")
    server.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    for name, port in (("http_port", 8000), ("grpc_port", 8001), ("metrics_port", 8002)):
        server.add_argument(f"--{name}", type=int, default=port, help="(default: %(default)s)")
    server.add_argument("--shm_prefix", help="of shared memory regions (default: a fresh one)")
    server.add_argument(
        "--log_level", choices=LOG_LEVELS, default="info", help="(default: %(default)s)"
    )
    server.add_argument(
        "--model_control_mode", choices=CONTROL_MODES, default="none", help="(default: %(default)s)"
    )
    server.add_argument(
        "--load_model", action="append", default=[], help="with explicit control; repeatable"
    )
    server.add_argument(
        "--exit_on_error",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end when a model cannot be loaded (default: yes)",
    )
    server.add_argument(
        "--exit_timeout_s", type=int, default=30, metavar="S", help="to drain (default: 30)"
    )
    server.add_argument(
        "--server_arg", action="append", default=[], metavar="ARG", help="more, as it is"
    )
    models = parser.add_argument_group("models")
    for name, text in _TEMPLATE_SWITCHES:
        models.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=text)
    models.add_argument(
        "--engine_python",
        metavar="PROGRAM",
        help="with torch (default: this one; see --model_repo)",
    )
    models.add_argument(
        "--preprocessing_instance_count", type=int, metavar="N", help="(default: 1)"
    )
    models.add_argument("--bls_max_requests", type=int, metavar="N", help="(default: 256)")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run it; returns the exit code, that of the server where one ran."""
    search_path = os.environ.get("PATH", os.defpath)
    environment_dir = args.server_env or _cache_dir() / "triton_server"
    if args.install_server:
        server = install_server(environment_dir, search_path)
        print(f"installed {server.binary}")
        return 0
    if args.engine_dir is None:
        raise LooptrtError("--engine_dir: expected an engine directory; see looptrt triton --help")
    if args.model_repo is not None:
        models = write_repository(args.model_repo, _template_values(args, ""), links_package=False)
        print(f"wrote {', '.join(models)} to {args.model_repo}")
        return 0
    options = _server_options(args)
    check_ports(options)
    server = find_server(args.tritonserver, environment_dir, search_path)
    with _repository(args) as repository:
        host = options.host
        print(
            f"looptrt: {server.binary} on http://{host}:{options.http_port}, "
            f"grpc {host}:{options.grpc_port}, metrics http://{host}:{options.metrics_port}/metrics",
            file=sys.stderr,
        )
        return run_server(server, repository, options, dict(os.environ))


@contextmanager
def _repository(args: argparse.Namespace) -> Iterator[Path]:
    with TemporaryDirectory(prefix="looptrt-triton-") as folder:
        repository = Path(folder) / "models"
        values = _template_values(args, sys.executable)
        values = dataclasses.replace(values, drain_file=drain_file(repository))
        write_repository(repository, values, links_package=True)
        yield repository


def _template_values(args: argparse.Namespace, python: str) -> RepositoryOptions:
    counts = ("preprocessing_instance_count", "bls_max_requests")
    names = (*(name for name, _ in _TEMPLATE_SWITCHES), *counts)
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    for name in counts:
        if given.get(name, 1) < 1:
            raise LooptrtError(f"--{name}: expected a number above 0, got {given[name]}")
    return RepositoryOptions(
        engine_dir=args.engine_dir,
        engine_config=engine_config(args),
        engine_python=args.engine_python or python,
        **given,
    )


def _server_options(args: argparse.Namespace) -> ServerOptions:
    return ServerOptions(
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        shm_prefix=args.shm_prefix or f"looptrt_{os.getpid()}_{secrets.token_hex(4)}_",
        log_level=args.log_level,
        model_control_mode=args.model_control_mode,
        load_models=tuple(args.load_model),
        exit_on_error=args.exit_on_error,
        exit_timeout_s=args.exit_timeout_s,
        arguments=tuple(args.server_arg),
    )


def _cache_dir() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "looptrt"
