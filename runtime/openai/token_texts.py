"""Tokens as strings, for log-probabilities.

Owns how one token is written and where it begins in a choice's text; leaves the text itself to
`runtime.answer`. Invariant: the same token behind the same token is written the same way, as
the choice's own token and as one of the likely others.
"""

from __future__ import annotations

from collections.abc import Sequence

from looptrt.runtime.detokenizer import Detokenizer
from looptrt.runtime.tokenizer import Tokenizer

_BROKEN = "\ufffd"


class TokenTexts:
    """Strings of an engine's tokens; without a tokenizer `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer

    def text(self, token_id: int, after: int | None) -> str:
        """What a token adds behind another one; a part of a character is U+FFFD."""
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        if after is not None:
            before = self._decode([after])
            both = self._decode([after, token_id])
            if both.startswith(before):
                return both[len(before) :]
        return self._decode([token_id])

    def _decode(self, token_ids: list[int]) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


def utf8_bytes(text: str) -> list[int] | None:
    """Bytes of a token's string; None for a part of a character."""
    return None if _BROKEN in text else list(text.encode())


class Offsets:
    """Where tokens begin in a text that starts with a first part, such as the prompt.

    Args:
        tokenizer: None puts every token at the start.
        start: characters before the tokens.
        skip_special_tokens: whether they are left out of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, start: int, skip_special_tokens: bool
    ) -> None:
        self._next = start
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Offsets of the next tokens, in characters."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._next)
            if self._detokenizer is not None:
                self._next += len(self._detokenizer.push(token_id))
        return offsets
