"""Which token ids begin, end and pad, and which files turn text into tokens and back.

Owns the union of the sources and the record of where each id came from; leaves text to the
runtime. Invariant: every id is one that the model can produce, every file one that the
runtime can load.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from looptrt.errors import CheckpointError
from looptrt.manifest import TokenIds
from looptrt.models.chat_template import (
    TEMPLATE_NAME,
    TOKENIZER_CONFIG_NAME,
    compile_template,
    find_template,
    special_tokens,
)
from looptrt.models.checkpoint import Checkpoint
from looptrt.models.family import Family
from looptrt.models.files import file_bytes, is_there, read_json, shown
from looptrt.models.tokenizer_file import TOKENIZER_NAME, open_tokenizer

GENERATION_CONFIG_NAME = "generation_config.json"
TOKENIZER_FILES = (
    TOKENIZER_NAME,
    TOKENIZER_CONFIG_NAME,
    "special_tokens_map.json",
    GENERATION_CONFIG_NAME,
    TEMPLATE_NAME,
)

_logger = logging.getLogger(__name__)


def tokenizer_files(directory: Path, family: Family) -> dict[str, Path | str]:
    """What an engine directory takes over for its text side, all of it checked.

    Returns:
        {file name: the checkpoint's file, or a text}; the family's chat template if there is
        a tokenizer and the checkpoint brings no template of its own.

    Raises:
        CheckpointError: a file could not be used by the runtime; names it.
    """
    found = [name for name in TOKENIZER_FILES if is_there(directory / name)]
    files: dict[str, Path | str] = {name: directory / name for name in found}
    for name in found:
        file_bytes(directory / name)
    special_tokens(directory)
    own = find_template(directory)
    if own is None and family.chat_template is not None and TOKENIZER_NAME in files:
        compile_template(family.chat_template, f"{family.architecture}: chat_template")
        files[TEMPLATE_NAME] = family.chat_template
        _logger.info("%s: no chat template; the family's is used", directory)
    return files


def token_ids(checkpoint: Checkpoint, vocab_size: int, end_tokens: Sequence[str]) -> TokenIds:
    """Decide the special ids of a checkpoint.

    The end ids are all of: `eos_token_id` of config.json and of generation_config.json, and
    the family's end tokens that tokenizer.json has.

    Raises:
        CheckpointError: an id is not one of the vocabulary's, or a file is malformed.
    """
    configs = [(checkpoint.config_path, checkpoint.config)]
    generation_path = checkpoint.directory / GENERATION_CONFIG_NAME
    if is_there(generation_path):
        configs.append((generation_path, read_json(generation_path)))
    sources: dict[str, tuple[int, ...]] = {}
    pads: list[int] = []
    for path, config in configs:
        sources[f"{path.name} eos_token_id"] = _ids(path, config, "eos_token_id", vocab_size)
        pads += _ids(path, config, "pad_token_id", vocab_size)
    tokenizer = _open_tokenizer(checkpoint.directory / TOKENIZER_NAME)
    if tokenizer is not None:
        path = checkpoint.directory / TOKENIZER_NAME
        sources |= _end_ids(end_tokens, tokenizer, path, vocab_size)
    source = "; ".join(f"{name} {', '.join(map(str, ids))}" for name, ids in sources.items() if ids)
    eos = tuple(sorted({token for ids in sources.values() for token in ids}))
    if eos:
        _logger.info("answers end at token ids %s (%s)", list(eos), source)
    else:
        _logger.warning("%s: no token id ends an answer", checkpoint.directory)
    bos = None if tokenizer is None else _bos(tokenizer, checkpoint.directory, vocab_size)
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
            f"{where}: expected token ids from 0 to {vocab_size - 1}, got {shown(value)}"
        )


def _open_tokenizer(path: Path) -> Tokenizer | None:
    if not is_there(path):
        _logger.warning("%s: missing; the engine takes and gives token ids only", path)
        return None
    return open_tokenizer(path)


def _end_ids(
    contents: Sequence[str], tokenizer: Tokenizer, path: Path, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for content in contents:
        token = tokenizer.token_to_id(content)
        if token is not None:
            _check_id(f"{path}: {content}", token, vocab_size)
            found[f"{path.name} {content}"] = (token,)
    return found


def _bos(tokenizer: Tokenizer, directory: Path, vocab_size: int) -> int | None:
    """The special token that the tokenizer puts in front of a text."""
    encoding = tokenizer.encode("a")
    if not encoding.special_tokens_mask or not encoding.special_tokens_mask[0]:
        return None
    _check_id(f"{directory / TOKENIZER_NAME}: begin token", encoding.ids[0], vocab_size)
    return int(encoding.ids[0])
