"""Generated tokens to visible text, piece by piece, and where a stop string ends it.

Owns what may be shown and when; leaves which token comes next to the engine. Invariant: the
pieces of a stream, joined, are the text that decoding all tokens at once gives, cut exactly
before the stop string; the cost of a token does not grow with the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from looptrt.runtime.sampling_params import Word
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

    Args:
        tokenizer: of the engine directory.
        skip_special_tokens: show nothing for them.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._text = ""  # decoded window
        self._shown = 0  # characters of it that were given out

    def push(self, token_id: int) -> str:
        """Take one token; returns the text that is certain now."""
        if not self._is_visible(token_id):
            return ""
        if len(self._window) == _WINDOW:
            del self._window[0]
            self._text = self._decode()
            self._shown = _certain(self._text)
        self._window.append(token_id)
        self._text = self._decode()
        certain = max(_certain(self._text), self._shown)
        piece, self._shown = self._text[self._shown : certain], certain
        return piece

    def flush(self) -> str:
        """The held-back rest, as decoding all tokens at once would show it."""
        piece, self._shown = self._text[self._shown :], len(self._text)
        return piece

    def _is_visible(self, token_id: int) -> bool:
        is_skipped = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        return not is_skipped and self._tokenizer.is_known(token_id)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)


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

    def push(self, piece: str, *, may_stop: bool = True) -> str | StopMatch:
        """Take a piece; returns the text that no stop string can claim, or the match.

        A stop string whose end lies in a piece that may not stop is none.
        """
        text = self._held + piece
        found = [
            (begin + len(stop), begin, stop)
            for stop in self._stops
            if (begin := text.find(stop, max(0, len(self._held) + 1 - len(stop)))) >= 0
        ]
        if found and may_stop:
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


class AnswerText:
    """The visible text of one answer: tokens in, cut off at a stop string or sequence.

    Args:
        tokenizer: None gives no text; stop sequences are found all the same.
        stops: texts and token sequences that end the answer.
        min_tokens: none of them ends with one of the first `min_tokens` tokens.
        include_stop: keep the one that ended the answer.
        skip_special_tokens: leave special tokens out.

    Attributes:
        stop: what ended the text, None while it goes on.
        pieces: the text so far, joined; only ever appended to.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: tuple[Word, ...] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self.stop: Word | None = None
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._texts = StopMatcher(tuple(stop for stop in stops if isinstance(stop, str)))
        # A token sequence is matched as the string of its ids' characters.
        sequences = (stop for stop in stops if not isinstance(stop, str))
        self._sequences = StopMatcher(tuple("".join(map(chr, ids)) for ids in sequences))
        self._num_taken = self._num_shown = 0
        self.pieces: list[str] = []

    def push(self, token_id: int) -> None:
        """Take a token; none must follow once `stop` is set."""
        self._num_taken += 1
        may_stop = self._num_taken > self._min_tokens
        found = self._sequences.push(chr(token_id), may_stop=may_stop)
        self._show(found.text if isinstance(found, StopMatch) else found)
        if isinstance(found, StopMatch):
            if self._include_stop:
                self._show(found.stop)
            self._flush()
            self.stop = self.stop or tuple(map(ord, found.stop))

    def end(self) -> None:
        """Take the end of the answer: nothing is held back any more."""
        self._show(self._sequences.flush())
        self._flush()
        self.pieces.append(self._texts.flush())

    def joined(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    def _show(self, characters: str) -> None:
        """Decode tokens that no stop sequence can claim."""
        for character in characters:
            if self._detokenizer is None or self.stop is not None:
                return
            self._num_shown += 1
            self._add(self._detokenizer.push(ord(character)))

    def _flush(self) -> None:
        if self._detokenizer is not None and self.stop is None:
            self._add(self._detokenizer.flush())

    def _add(self, piece: str) -> None:
        found = self._texts.push(piece, may_stop=self._num_shown > self._min_tokens)
        if isinstance(found, StopMatch):
            self.stop = found.stop
            found = found.text + found.stop if self._include_stop else found.text
        self.pieces.append(found)
