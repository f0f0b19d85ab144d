"""Generated tokens to visible text, piece by piece, and where a stop string ends it.

Owns what may be shown and when; leaves which token comes next to the engine. Invariant: the
pieces of a stream, joined, are the text that decoding all tokens at once gives, cut exactly
before the stop string; the cost of a token does not grow with the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from looptrt.runtime.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so at most 3 tokens of one that is unfinished are
# known; a decoder shows them as up to 3 replacement characters.
_MAX_UNFINISHED = 3
# Dropping a token in front of the window can spoil one character (4 bytes) at its head. The
# tail that decides what is held back spans 3 broken sequences of 3 bytes and the character
# before them. A visible token has at least one byte: 16 tokens keep the two apart.
_WINDOW = 16


class Detokenizer:
    """Decodes one request's tokens as they come.

    Text that ends in replacement characters may be an unfinished character and is held back,
    but never more than the last 3 characters, so invalid bytes do not stall the stream.
    Exact for decoders that map tokens to bytes one by one, which every byte-level one does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._text = ""  # decoded window
        self._shown = 0  # characters of it that were given out

    def push(self, token_id: int) -> str:
        """Take one token; returns the text that is certain now."""
        if not self._tokenizer.is_visible(token_id):
            return ""
        if len(self._window) == _WINDOW:
            del self._window[0]
            self._text = self._tokenizer.decode(self._window)
            self._shown = _certain(self._text)
        self._window.append(token_id)
        self._text = self._tokenizer.decode(self._window)
        certain = max(_certain(self._text), self._shown)
        piece, self._shown = self._text[self._shown : certain], certain
        return piece

    def flush(self) -> str:
        """The held-back rest, as decoding all tokens at once would show it."""
        piece, self._shown = self._text[self._shown :], len(self._text)
        return piece


def _certain(text: str) -> int:
    """Characters of `text` that no later token can change."""
    num_unfinished = 0
    while num_unfinished < _MAX_UNFINISHED and text.endswith(
        _REPLACEMENT, 0, len(text) - num_unfinished
    ):
        num_unfinished += 1
    return len(text) - num_unfinished


@dataclass(frozen=True)
class StopMatch:
    """Text up to the stop string, and the stop string."""

    text: str
    stop: str


class StopMatcher:
    """Finds the first stop string to be completed in a text that comes in pieces.

    The stop string whose last character comes first wins; of several that end with the same
    character, the longest. So the outcome is the same however the text is cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, piece: str) -> str | StopMatch:
        """Take a piece; returns the text that no stop string can claim, or the match."""
        text = self._held + piece
        found = [
            (begin + len(stop), begin, stop)
            for stop in self._stops
            if (begin := text.find(stop)) >= 0
        ]
        if found:
            _, begin, stop = min(found)
            self._held = ""
            return StopMatch(text[:begin], stop)
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The held-back rest, once the text has ended."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
