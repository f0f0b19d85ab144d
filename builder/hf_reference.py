"""The user's own Transformers installation as a reference.

Owns loading it, telling whether it is sound and running it; leaves judging numbers to
`compare`. Invariant: code of a checkpoint runs only if the caller trusts it, and a reference
whose rotary tables are wrong is never compared with.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import torch

from looptrt.builder.source import Source
from looptrt.errors import BuildError
from looptrt.loop_spec import LoopSpec
from looptrt.models.blocks import inverse_frequencies
from looptrt.models.checkpoint import Naming

_FREQUENCY_ERROR = 1e-5  # relative; float32 arithmetic in another order stays far below
_TABLE_ERROR = 5e-4  # float32 angles at position 4096 are off by 2.4e-4
_ROUNDED_TABLE_ERROR = 4e-3  # a table that went through bfloat16 is off by 2e-3

_logger = logging.getLogger(__name__)


class HfReference:
    """A model of the Transformers library.

    Args:
        source: the opened checkpoint.
        dtype: what the library loads it in.
        trust_remote_code: whether code in the checkpoint may run.

    Raises:
        BuildError: Transformers is missing, the code is not trusted, the library cannot load
            the checkpoint, or its rotary tables are wrong.
    """

    def __init__(self, source: Source, dtype: str, *, trust_remote_code: bool) -> None:
        self._arguments = _arguments(source.spec)
        self._model = _load(source, dtype, trust_remote_code)
        check_rotary_tables(self._model, source.spec)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits of every position, [tokens, vocab] float32."""
        ids = torch.tensor([list(token_ids)])
        logits: torch.Tensor = self._model(input_ids=ids, **self._arguments).logits
        return logits[0].float()


def _arguments(spec: LoopSpec) -> dict[str, Any]:
    """What pins the reference to the run we make: all loops, and a state of zeros."""
    arguments: dict[str, Any] = {"use_cache": False}
    if spec.exit_gate:
        arguments["exit_at_step"] = spec.num_loops - 1
    if spec.adapter:
        arguments |= {"num_steps": spec.num_loops, "init_scale": 0.0}
    return arguments


def _load(source: Source, dtype: str, trust_remote_code: bool) -> Any:  # noqa: ANN401 - no stubs
    checkpoint = source.opened
    if checkpoint.naming is not Naming.HF:
        raise BuildError(
            f"--reference hf: {checkpoint.directory}: Transformers does not read TensorRT-LLM's "
            "names; convert the checkpoint with `looptrt convert --to hf` first"
        )
    if importlib.util.find_spec("transformers") is None:
        raise BuildError(
            "--reference hf: Transformers is not installed here; `pip install transformers`"
        )
    if "auto_map" in checkpoint.config and not trust_remote_code:
        raise BuildError(
            f"--reference hf: {checkpoint.config_path}: auto_map names code in the checkpoint; "
            "read it and say --trust-remote-code to have it run"
        )
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.directory,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
    except Exception as error:  # the library and foreign code may raise anything
        raise BuildError(
            f"--reference hf: Transformers {transformers.__version__} cannot load "
            f"{checkpoint.directory}: {error!r}; the published modelling files were written for "
            "Transformers 4 (`pip install 'transformers<5'`)"
        ) from error
    return model.eval()


def check_rotary_tables(model: torch.nn.Module, spec: LoopSpec) -> None:
    """Check a reference's rotary tables against what the formula gives.

    Newer loaders leave tables that are not in the file uninitialised, and `.to(bfloat16)` on a
    whole module rounds them: both give finite, wrong logits. Huginn's table is in the file and
    comes out rounded if the file or the loader rounds it: it is replaced by the exact one.

    Raises:
        BuildError: a table is wrong; names it.
    """
    expected = inverse_frequencies(spec).double()
    for name, table in [*model.named_buffers()]:
        owner, _, what = name.rpartition(".")
        if what == "inv_freq":
            _check_frequencies(name, table, expected)
        elif what == "freqs_cis":
            setattr(model.get_submodule(owner), what, _exact_table(name, table, expected))


def _check_frequencies(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if found.dtype != torch.float32:
        raise BuildError(
            f"--reference hf: {name}: expected float32, found {found.dtype}: the reference's "
            "rotary frequencies are rounded; load it with dtype= instead of casting the module"
        )
    error = float("inf")
    if found.shape == expected.shape:
        error = float(((found.double() - expected) / expected).abs().max())
    if not error <= _FREQUENCY_ERROR:
        raise BuildError(
            f"--reference hf: {name}: off by {error:.3g} of 1/theta^(2i/d): this version of "
            "Transformers left the reference's rotary frequencies uninitialised or wrong"
        )


def _exact_table(name: str, found: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Check cosines and sines, [1, positions, 1, pairs, 2]; the table to run with."""
    angles = torch.outer(torch.arange(found.shape[1]).double(), frequencies)
    exact = torch.stack([angles.cos(), angles.sin()], dim=-1)[None, :, None]
    error = float("inf")
    if found.shape == exact.shape:
        error = float((found.double() - exact).abs().max())
    if not error <= _ROUNDED_TABLE_ERROR:
        raise BuildError(
            f"--reference hf: {name}: off by {error:.3g} of the cosines and sines: the "
            "reference's rotary table is uninitialised or wrong"
        )
    if error <= _TABLE_ERROR:
        return found
    _logger.warning(
        "%s: off by %.3g, as a table rounded to bfloat16 is; the reference runs with the exact one",
        name,
        error,
    )
    return exact.float()
