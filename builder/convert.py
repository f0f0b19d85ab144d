"""`looptrt convert`: a checkpoint under other names, in either direction and without loss.

Owns the pairing of two naming schemes through the stored tensors that both describe; leaves
reading, checking and casting to the modules that build uses. Invariant: without a dtype every
tensor keeps its bits, and the target is written whole or not at all.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from looptrt.builder.casts import TORCH_DTYPES, CastLog, unfuse
from looptrt.builder.engine_dir import (
    atomic_directory,
    check_beside_checkpoint,
    check_path,
    check_target,
)
from looptrt.builder.source import Source, open_checkpoint, source_shapes, with_names
from looptrt.builder.tokens import TOKENIZER_FILES
from looptrt.builder.weights import STORED_DTYPES, WeightsLayout, write_weights
from looptrt.errors import BuildError, CheckpointError
from looptrt.models.checkpoint import CONFIG_NAME, SINGLE_NAME, Checkpoint, Naming
from looptrt.models.family import WeightRecipe
from looptrt.models.trtllm_config import RANK_NAME, trtllm_config

_CARRIED = (*TOKENIZER_FILES, "added_tokens.json", "merges.txt", "tokenizer.model", "vocab.json")
_DTYPE_KEYS = ("dtype", "torch_dtype")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Pairing:
    """How the tensors of one checkpoint make those of another.

    Attributes:
        checkpoint: where the tensors are read.
        read: {stored name: recipe} under the names read.
        written: {stored name: recipe} under the names written.
        extras: tensors that no recipe reads; they keep their names.
        dtype: what the model's tensors are cast to, None to keep each as it is.
    """

    checkpoint: Checkpoint
    read: Mapping[str, WeightRecipe]
    written: Mapping[str, WeightRecipe]
    extras: frozenset[str]
    dtype: torch.dtype | None

    def stand_ins(self) -> dict[str, torch.Tensor]:
        """{name written: tensor on the meta device}."""
        entries = self.checkpoint.tensors
        made = {}
        for name in self.extras:
            if entries[name].dtype not in STORED_DTYPES:
                raise CheckpointError(
                    f"{entries[name].file}: tensor {name!r}: {entries[name].dtype} cannot be "
                    "carried along"
                )
            dtype = STORED_DTYPES[entries[name].dtype]
            made[name] = torch.empty(entries[name].shape, dtype=dtype, device="meta")
        for stored, recipe in self.written.items():
            source = entries[self.read[stored].sources[0]]
            dtype = self.dtype or STORED_DTYPES[source.dtype]
            made |= {
                name: torch.empty(shape, dtype=dtype, device="meta")
                for name, shape in source_shapes({stored: recipe}).items()
            }
        return made

    def write(self, path: Path) -> None:
        """Write all tensors to one file."""
        casts = CastLog()
        owners = {name: stored for stored, item in self.written.items() for name in item.sources}

        def make(name: str) -> torch.Tensor:
            if name in self.extras:
                return self.checkpoint.read(name)
            stored = owners[name]
            fused = casts.fused(self.checkpoint, self.read[stored], self.dtype)
            return unfuse(self.written[stored], fused)[name]

        write_weights(make, WeightsLayout.of_tensors(self.stand_ins()), path, workers=1)
        casts.report()


def convert(directory: Path, output: Path, to: str | None, dtype: str | None) -> None:
    """Write a checkpoint under the names of the other layout, or of the one given.

    Args:
        directory: the checkpoint.
        output: directory to write; absent or empty.
        to: `hf` or `trtllm`, whose names to use; None for the other one.
        dtype: cast the model's tensors to it, None to keep each as it is.

    Raises:
        BuildError: the dtype is unknown or the target must not be written.
        CheckpointError: the checkpoint cannot be used. The target is then as it was.
    """
    if dtype is not None and dtype not in TORCH_DTYPES:
        raise BuildError(f"--dtype {dtype}: expected {' or '.join(TORCH_DTYPES)}")
    check_target(output, replaces=False)
    check_path(directory, "--checkpoint_dir")
    check_beside_checkpoint(output, directory)
    source = open_checkpoint(directory)
    naming = _other(source.opened.naming) if to is None else Naming(to)
    pairing = _pairing(source, naming, None if dtype is None else TORCH_DTYPES[dtype])
    config = _config(source, naming, dtype)
    with atomic_directory(output, replaces=False) as draft:
        pairing.write(draft / (RANK_NAME if naming is Naming.TRTLLM else SINGLE_NAME))
        text = json.dumps(config, indent=2) + "\n"
        (draft / CONFIG_NAME).write_text(text, encoding="utf-8")
        for path in [*map(directory.joinpath, _CARRIED), *directory.glob("*.py")]:
            if path.is_file():
                shutil.copyfile(path, draft / path.name)
    _logger.info("wrote %s under the names of %s", output, naming)


def _other(naming: Naming) -> Naming:
    return Naming.HF if naming is Naming.TRTLLM else Naming.TRTLLM


def _pairing(source: Source, to: Naming, dtype: torch.dtype | None) -> _Pairing:
    checkpoint, spec = source.checkpoint, source.spec
    reader = with_names(source.family, checkpoint.naming)
    if {reader.head, reader.embedding} <= source.opened.tensors.keys():
        # An engine stores an equal head once; a converted checkpoint keeps both copies.
        checkpoint, spec = source.opened, replace(spec, tied_head=False)
    read = reader.weight_map(spec)
    written = with_names(source.family, to).weight_map(spec)
    extras = frozenset(checkpoint.tensors.keys() - source_shapes(read).keys())
    return _Pairing(checkpoint, read, written, extras, dtype)


def _config(source: Source, to: Naming, dtype: str | None) -> dict[str, Any]:
    config = dict(source.opened.config)
    if dtype is not None:
        keys = [key for key in _DTYPE_KEYS if config.get(key) is not None] or ["dtype"]
        config |= dict.fromkeys(keys, dtype)
    if to is Naming.HF:
        return config
    return trtllm_config(config, source.spec, dtype or source.opened.declared_dtype)
