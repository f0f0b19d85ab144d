"""Which token ids begin, end and pad, decided once from all that a checkpoint says.

Owns the union of the sources and the record of where each id came from; leaves templates
and text to the runtime. Invariant: every id is one that the model can produce.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from looptrt.errors import CheckpointError
from looptrt.manifest import TokenIds
from looptrt.models.checkpoint import Checkpoint, read_json

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
# Published configs name too few ids: an Ouro chat turn ends in <|im_end|>, yet its config
# says that 0 is begin, end and pad (case A1).
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|end_text|>", "<|end_turn|>")

_logger = logging.getLogger(__name__)


def token_ids(checkpoint: Checkpoint, vocab_size: int) -> TokenIds:
    """Decide the special ids of a checkpoint.

    The end ids are all of: `eos_token_id` of config.json and of generation_config.json, and
    the known end-of-turn tokens that tokenizer.json has.

    Raises:
        CheckpointError: an id is not one of the vocabulary's, or a file is malformed.
    """
    configs = [(checkpoint.config_path, checkpoint.config)]
    generation_path = checkpoint.directory / "generation_config.json"
    if generation_path.exists():
        configs.append((generation_path, read_json(generation_path)))
    sources: dict[str, tuple[int, ...]] = {}
    pads: list[int] = []
    for path, config in configs:
        sources[f"{path.name} eos_token_id"] = _ids(path, config, "eos_token_id", vocab_size)
        pads += _ids(path, config, "pad_token_id", vocab_size)
    tokenizer = _open_tokenizer(checkpoint.directory / TOKENIZER_NAME)
    if tokenizer is not None:
        sources |= _end_tokens(tokenizer, checkpoint.directory / TOKENIZER_NAME, vocab_size)
    source = "; ".join(f"{name} {', '.join(map(str, ids))}" for name, ids in sources.items() if ids)
    eos = tuple(sorted({token for ids in sources.values() for token in ids}))
    if eos:
        _logger.info("answers end at token ids %s (%s)", list(eos), source)
    else:
        _logger.warning("%s: no token id ends an answer", checkpoint.directory)
    bos = None if tokenizer is None else _bos(tokenizer)
    return TokenIds(bos=bos, eos=eos, pad=pads[0] if pads else None, source=source or "nowhere")


def _ids(path: Path, config: dict[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    value = config.get(key)
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    for item in values:
        _check_id(f"{path}: {key}", item, vocab_size)
    return tuple(values)


def _check_id(where: str, value: object, vocab_size: int) -> None:
    if type(value) is not int or not 0 <= value < vocab_size:
        raise CheckpointError(
            f"{where}: expected token ids from 0 to {vocab_size - 1}, got {value!r}"
        )


def _open_tokenizer(path: Path) -> Tokenizer | None:
    if not path.exists():
        _logger.warning("%s: missing; the engine takes and gives token ids only", path)
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise CheckpointError(f"{path}: not a usable tokenizer: {error}") from error


def _end_tokens(tokenizer: Tokenizer, path: Path, vocab_size: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for content in _END_TOKENS:
        token = tokenizer.token_to_id(content)
        if token is not None:
            _check_id(f"{path}: {content}", token, vocab_size)
            found[f"{path.name} {content}"] = (token,)
    return found


def _bos(tokenizer: Tokenizer) -> int | None:
    """The special token that the tokenizer puts in front of a text."""
    encoding = tokenizer.encode("a")
    if encoding.special_tokens_mask and encoding.special_tokens_mask[0]:
        return int(encoding.ids[0])
    return None
