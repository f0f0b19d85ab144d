"""`looptrt build` and `trtllm-build`: checkpoint to engine directory."""

from __future__ import annotations

import logging
import resource
import sys

from looptrt.cli.guard import ended_by_signals, show_logs

_logger = logging.getLogger(__name__)


def hand_over(arguments: list[str]) -> int | None:
    """TensorRT-LLM's exit code for an architecture that is not ours, None for one that is."""
    from looptrt.builder import handover  # noqa: PLC0415 - see run

    if handover.foreign_architecture(arguments) is None:
        return None
    with ended_by_signals():
        return handover.hand_over(arguments)


def run(arguments: list[str], prog: str) -> int:
    """Build; returns the exit code."""
    # The builder loads torch and ONNX: seconds that no other command should pay.
    from looptrt.builder import build, flags  # noqa: PLC0415

    command = flags.read_command(arguments, prog)
    with show_logs(command.log_level), ended_by_signals():
        if command.dry_run:
            sys.stdout.write(build.plan_build(command.config).describe())
        else:
            build.build(command.config)
        if command.monitor_memory:
            processes = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
            peak_kib = max(resource.getrusage(who).ru_maxrss for who in processes)
            _logger.info("peak memory of the build's largest process: %d MiB", peak_kib // 1024)
    return 0
