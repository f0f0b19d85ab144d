"""Text to token ids and back, by the engine directory's tokenizer.json.

Owns what a prompt's encoding is and which tokens are visible as text; leaves streaming to
`detokenizer` and templates to `chat`. Invariant: what the tokenizer puts in front of a text
stays, what it puts behind it is dropped, since a prompt is to be continued.
"""

from __future__ import annotations

from pathlib import Path

from looptrt.errors import CheckpointError, ManifestError, RequestError
from looptrt.models.tokenizer_file import TOKENIZER_NAME, open_tokenizer

# Tokenizers can drop or merge a part of a text, spaces above all; none makes it this much shorter.
_MARGIN = 16


class Tokenizer:
    """An engine directory's tokenizer.

    Raises:
        ManifestError: the file is not a usable tokenizer.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = open_tokenizer(path)
        except CheckpointError as error:
            raise ManifestError(str(error)) from error
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._num_tail = self._count_tail()
        self._longest = max(map(len, self._tokenizer.get_vocab()), default=1)

    @staticmethod
    def of_engine(engine_dir: Path) -> Tokenizer | None:
        """The engine directory's tokenizer; None where there is none."""
        path = engine_dir / TOKENIZER_NAME
        return Tokenizer(path) if path.is_file() else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.

        Args:
            text: the prompt; special tokens written out in it count as such.
            add_special_tokens: put in front what the tokenizer's file asks for. A rendered
                chat template holds it already.

        Raises:
            RequestError: the text is not valid Unicode (a lone surrogate), or the tokenizer has
                no token for a part of it.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt: not valid Unicode text: {error}") from None
        try:
            # Unlike `encode` it lets other threads run meanwhile; the ids are the same.
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except Exception as error:  # tokenizers raises nothing more specific
            raise RequestError(f"prompt: the tokenizer cannot encode it: {error}") from error
        ids: list[int] = encoding.ids
        return ids[: len(ids) - self._num_tail] if add_special_tokens and self._num_tail else ids

    def check_length(self, name: str, text: str, max_input_len: int) -> None:
        """Refuse what is far too long before time and memory go into its encoding.

        Raises:
            RequestError: the text is `_MARGIN` times longer than `max_input_len` of the longest
                tokens; names the field.
        """
        most = _MARGIN * max_input_len * self._longest
        if len(text) > most:
            raise RequestError(
                f"{name}: expected at most {most} characters, {_MARGIN} times what "
                f"max_input_len {max_input_len} tokens can spell, got {len(text)}"
            )

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether a token stands for something else than text."""
        return token_id in self._special

    def is_known(self, token_id: int) -> bool:
        """Whether a token is in the vocabulary, which can be smaller than the model's."""
        return self._tokenizer.id_to_token(token_id) is not None

    def _count_tail(self) -> int:
        """Tokens that the tokenizer's file puts behind every text (Huginn: an end token)."""
        is_text = [sequence is not None for sequence in self._tokenizer.encode("a").sequence_ids]
        return is_text[::-1].index(True) if any(is_text) else 0
