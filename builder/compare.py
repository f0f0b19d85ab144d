"""`looptrt verify`: our logits against a reference's, position by position.

Owns prompts, tolerances and verdicts; leaves running either side to `dense_run` and
`hf_reference`. Invariant: the same tokens, depths and initial states go to both sides, and
only one model is in memory at a time.

In float32 the two sides may differ by rounding alone. In a coarser dtype both are off, and the
reference's own attention variants differ by as much as either does from float32: there our
distance from the float32 reference is held against the reference's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from looptrt.builder.casts import TORCH_DTYPES
from looptrt.builder.dense_run import DenseModel
from looptrt.builder.hf_reference import HfReference
from looptrt.builder.source import Source, open_checkpoint
from looptrt.errors import BuildError
from looptrt.models.tokenizer_file import TOKENIZER_NAME, open_tokenizer

_EXACT = "float32"
_OWN_ERRORS = 2.0  # how much further from float32 than the reference a coarser dtype may be
_LENGTHS = (9, 17, 33)  # around the edges of KV pages


@dataclass(frozen=True)
class Prompt:
    """Token ids and what to call them."""

    label: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """One prompt in one dtype, against the float32 reference.

    Attributes:
        num_positions: logit rows compared.
        max_diff: largest absolute difference of a logit.
        allowed: largest difference that passes.
        own_diff: the reference's own in this dtype; 0 in float32.
        num_same_top1: positions where both sides' most likely token is the same.
        first_beyond: first position with a difference that does not pass.
    """

    prompt: str
    dtype: str
    num_positions: int
    max_diff: float
    allowed: float
    own_diff: float
    num_same_top1: int
    first_beyond: int | None

    @property
    def passes(self) -> bool:
        """Whether every position is within what is allowed."""
        return self.first_beyond is None


def verify_checkpoint(
    directory: Path,
    *,
    texts: Sequence[str],
    num_prompts: int,
    tolerance: float,
    trust_remote_code: bool,
) -> list[Comparison]:
    """Compare our modules with the user's Transformers on a checkpoint.

    Args:
        directory: Hugging Face checkpoint directory.
        texts: prompts as text; none for random token ids.
        num_prompts: how many random prompts.
        tolerance: largest float32 difference, in parts of the largest logit.
        trust_remote_code: whether code in the checkpoint may run.

    Returns:
        A comparison for each prompt in float32, and in the declared dtype if that is another
        one that engines have.

    Raises:
        BuildError: the reference cannot be had or is not sound, or an argument is not usable.
        CheckpointError: the checkpoint cannot be used.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise BuildError(f"--tolerance: expected a number of at least 0, got {tolerance}")
    source = open_checkpoint(directory)
    prompts = _prompts(source, texts, num_prompts)
    declared = source.opened.declared_dtype
    dtypes = [_EXACT, *({declared} & TORCH_DTYPES.keys() - {_EXACT})]
    theirs = {
        dtype: _all_logits(HfReference(source, dtype, trust_remote_code=trust_remote_code), prompts)
        for dtype in dtypes
    }
    longest = max(len(prompt.token_ids) for prompt in prompts)
    rows = []
    for dtype in dtypes:
        ours = _all_logits(DenseModel(source, dtype, longest), prompts)
        for prompt, mine, own, exact in zip(
            prompts, ours, theirs[dtype], theirs[_EXACT], strict=True
        ):
            rows.append(compare(prompt.label, dtype, mine, own, exact, tolerance))
    return rows


def compare(
    prompt: str,
    dtype: str,
    ours: torch.Tensor,
    own: torch.Tensor,
    exact: torch.Tensor,
    tolerance: float,
) -> Comparison:
    """Judge one prompt.

    Args:
        prompt: what to call it.
        dtype: dtype of `ours` and `own`.
        ours: [positions, vocab] float32, our logits.
        own: the reference's logits in the same dtype.
        exact: the reference's logits in float32.
        tolerance: largest float32 difference, in parts of the largest logit.
    """
    if ours.shape != exact.shape:
        raise BuildError(
            f"--reference hf: logits of shape {list(exact.shape)}, ours {list(ours.shape)}"
        )
    diffs = (ours - exact).abs().amax(dim=1)
    own_diff = float((own - exact).abs().max())
    allowed = tolerance * float(exact.abs().max()) + _OWN_ERRORS * own_diff
    beyond = (~(diffs <= allowed)).nonzero()  # a NaN is beyond
    return Comparison(
        prompt=prompt,
        dtype=dtype,
        num_positions=len(diffs),
        max_diff=float(diffs.max()),
        allowed=allowed,
        own_diff=own_diff,
        num_same_top1=int((ours.argmax(dim=1) == exact.argmax(dim=1)).sum()),
        first_beyond=int(beyond[0]) if len(beyond) else None,
    )


def _all_logits(model: DenseModel | HfReference, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
    return [model.logits(prompt.token_ids) for prompt in prompts]


def _prompts(source: Source, texts: Sequence[str], num_prompts: int) -> list[Prompt]:
    limit = source.spec.max_position
    prompts = _encoded(source, texts) if texts else _drawn(source, num_prompts)
    for prompt in prompts:
        if not 1 <= len(prompt.token_ids) <= limit:
            raise BuildError(
                f"--prompt {prompt.label}: expected 1 to {limit} tokens, got "
                f"{len(prompt.token_ids)}"
            )
    return prompts


def _encoded(source: Source, texts: Sequence[str]) -> list[Prompt]:
    path = source.opened.directory / TOKENIZER_NAME
    if not path.is_file():
        raise BuildError(f"--prompt: {path}: no such file; random prompts need none (--prompts)")
    tokenizer = open_tokenizer(path)
    return [Prompt(repr(text), tuple(tokenizer.encode(text).ids)) for text in texts]


def _drawn(source: Source, num_prompts: int) -> list[Prompt]:
    if num_prompts < 1:
        raise BuildError(f"--prompts: expected at least 1, got {num_prompts}")
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for index in range(num_prompts):
        length = min(_LENGTHS[index % len(_LENGTHS)], source.spec.max_position)
        ids = torch.randint(source.spec.vocab_size, (length,), generator=generator)
        prompts.append(Prompt(f"random {index + 1}", tuple(ids.tolist())))
    return prompts
