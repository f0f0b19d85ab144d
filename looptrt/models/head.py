"""Whether a model's head is its embedding: the weights decide, not the config (case G4).

Owns that decision; leaves the names of both tensors, and what else the weights decide, to
the families. Invariant: a head that differs from the embedding is never discarded, and one
that is absent is never invented.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from looptrt.errors import CheckpointError
from looptrt.loop_spec import LoopSpec
from looptrt.models.checkpoint import Checkpoint
from looptrt.models.family import Family

_logger = logging.getLogger(__name__)


def settle_head(
    checkpoint: Checkpoint, family: Family, spec: LoopSpec
) -> tuple[Checkpoint, LoopSpec]:
    """Decide `spec.tied_head` from the tensors that are there.

    Args:
        checkpoint: the opened files.
        family: names the embedding and the head.
        spec: the config's word on it.

    Returns:
        The checkpoint under the names that the family's recipes use, without a second copy
        of the embedding; and the spec.

    Raises:
        CheckpointError: there is no head and the config does not tie it to the embedding.
    """
    head, embedding = family.head, family.embedding
    if head not in checkpoint.tensors:
        if not spec.tied_head:
            raise CheckpointError(
                f"{checkpoint.listing}: tensor {head!r}: missing, and "
                f"{checkpoint.config_path} does not tie it to {embedding!r}"
            )
        return checkpoint, spec
    file = checkpoint.tensors[head].file
    if embedding not in checkpoint.tensors:
        if spec.tied_head:
            _logger.warning("%s: %r is absent, tied %r is used for both", file, embedding, head)
            return checkpoint.renamed(head, embedding), spec
        return checkpoint, spec
    if checkpoint.same_values(head, embedding):
        _logger.info("%s: %r equals %r and is stored once", file, head, embedding)
        return checkpoint.renamed(head, embedding), replace(spec, tied_head=True)
    if spec.tied_head:
        _logger.warning(
            "%s: %r differs from %r and is used, although %s ties them",
            file,
            head,
            embedding,
            checkpoint.config_path,
        )
    return checkpoint, replace(spec, tied_head=False)
