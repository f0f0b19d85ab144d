"""tokenizer.json, opened the same way by the builder and the runtime.

Owns opening it and trying it out; leaves what its tokens mean to the callers. Invariant: what
is returned encodes, never cuts and never pads.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from looptrt.errors import CheckpointError
from looptrt.models.files import file_bytes

TOKENIZER_NAME = "tokenizer.json"


def open_tokenizer(path: Path) -> Tokenizer:
    """Open a tokenizer and encode a letter with it.

    Raises:
        CheckpointError: the file is missing, not a regular one or not a usable tokenizer.
    """
    file_bytes(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
        # A file can carry the settings it was trained with; a prompt is never cut nor padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("a")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # nothing more specific, and a panic is no Exception
        raise CheckpointError(f"{path}: not a usable tokenizer: {error}") from error
    return tokenizer
