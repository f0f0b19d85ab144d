"""Optimisation profiles: the sizes that an engine takes, from the limits of its build.

Owns the two profiles and their check; leaves their use to `compile_engine` and, at run time, to
the executor, which reads them from the manifest. Invariant: min <= opt <= max everywhere, and
what fits a profile fits the ones after it.
"""

from __future__ import annotations

from collections.abc import Mapping

from looptrt.builder.build_config import BuildConfig
from looptrt.errors import BuildError
from looptrt.kv_layout import PlaneLayout
from looptrt.manifest import BuildLimits, ShapeRange

# A size that changes from step to step (see `export`): its least, usual and greatest value.
Sizes = Mapping[str, tuple[int, int, int]]


def profile_sizes(
    config: BuildConfig, limits: BuildLimits, layout: PlaneLayout
) -> dict[str, Sizes]:
    """The sizes of both profiles: `decode`, a row for each request, and `prefill`, any step.

    Raises:
        BuildError: a flag prefers a size beyond its limit.
    """
    batch, tokens = limits.max_batch_size, limits.max_num_tokens
    pages = layout.num_pages(limits.max_seq_len)
    opt_batch = config.opt_batch_size
    if opt_batch == BuildConfig.opt_batch_size:  # not asked for
        opt_batch = min(opt_batch, batch)
    opt_tokens = config.opt_num_tokens or min(limits.max_input_len, tokens)
    for flag, value, most_flag, most in (
        ("opt_batch_size", opt_batch, "max_batch_size", batch),
        ("opt_num_tokens", opt_tokens, "max_num_tokens", tokens),
    ):
        if value > most:
            raise BuildError(f"--{flag} {value}: expected at most {most_flag}, {most}")
    sequences = {
        "N": (1, opt_batch, batch),
        "N_plus_1": (2, opt_batch + 1, batch + 1),
        "max_slots": (1, batch, batch),
        "max_pages": (1, pages, pages),
    }
    rows = {"decode": (1, opt_batch, batch), "prefill": (1, opt_tokens, tokens)}
    # Rows of logits: those of requests, and in a prefill step of prompts whose
    # log-probabilities were asked for.
    logit_rows = {"decode": (1, opt_batch, batch), "prefill": (1, opt_batch, tokens)}
    return {
        name: {"T": rows[name], "R": rows[name], "M": logit_rows[name], **sequences}
        for name in rows
    }


def shape_ranges(
    inputs: Mapping[str, tuple[str | int, ...]], profiles: Mapping[str, Sizes]
) -> dict[str, dict[str, ShapeRange]]:
    """Profiles of one graph.

    Args:
        inputs: {input: shape}; strings are sizes that change.
        profiles: {profile: the values of those}.

    Raises:
        BuildError: a tensor's sizes are not min <= opt <= max, or reach 0; names it.
    """
    return {
        profile: {name: _range(profile, name, dims, sizes) for name, dims in inputs.items()}
        for profile, sizes in profiles.items()
    }


def _range(profile: str, name: str, dims: tuple[str | int, ...], sizes: Sizes) -> ShapeRange:
    ends = [sizes[dim] if isinstance(dim, str) else (dim, dim, dim) for dim in dims]
    if not all(1 <= low <= opt <= high for low, opt, high in ends):
        raise BuildError(
            f"{name}: profile {profile}: expected 1 <= min <= opt <= max in each dimension, got "
            f"{', '.join(map(str, ends))}"
        )
    low, opt, high = zip(*ends, strict=True)
    return ShapeRange(low, opt, high)
