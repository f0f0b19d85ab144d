"""Streamed text: characters split over tokens (case C6) and stop strings (case C5)."""

from __future__ import annotations

import functools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from looptrt.runtime.detokenizer import Detokenizer, StopMatch, StopMatcher
from looptrt.runtime.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "客单价 客单价 客单价是多少",
    "ď ďábel ďábel",
    "emoji 😀 😀 👨‍👩‍👧 family",
    "beta gamma delta",
]


@functools.cache
def trained_bpe() -> RawTokenizer:
    """A byte-level BPE tokenizer whose merges cross character borders."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return raw


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    trained_bpe().save(str(path))
    return Tokenizer(path)


def byte_ids(data: bytes) -> list[int]:
    """One token for each byte."""
    letters = bytes_to_letters()
    ids = [trained_bpe().token_to_id(letters[byte]) for byte in data]
    assert None not in ids
    return ids


@functools.cache
def bytes_to_letters() -> dict[int, str]:
    """The byte-level alphabet of GPT-2."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    return letters | {byte: chr(256 + index) for index, byte in enumerate(rest)}


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 399), max_size=60))
def test_stream_equals_one_shot_decode_for_any_tokens(bpe: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(bpe, ids)) == bpe.decode(ids)


@given(st.binary(max_size=80))
@example(b"\xff" * 60)
@example(b"\xe5\xae" * 30)
@example(b"\xf0\x9f\x98" * 20)
@example(b"\xe5\xae\xa2\xe5" * 20)
def test_stream_equals_one_shot_decode_for_any_bytes(bpe: Tokenizer, data: bytes) -> None:
    pieces = stream(bpe, byte_ids(data))
    assert "".join(pieces) == data.decode(errors="replace")


@given(st.text(alphabet="aď客单价😀👨‍👩‍👧 \u0301é", max_size=40), st.data())
def test_valid_text_shows_no_replacement_character(
    bpe: Tokenizer, text: str, data: st.DataObject
) -> None:
    encoded = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(encoded)), max_size=5)))
    ids: list[int] = []
    for begin, end in zip([0, *cuts], [*cuts, len(encoded)], strict=True):
        part = encoded[begin:end]
        whole = part.decode(errors="ignore").encode() == part
        ids += bpe.encode(part.decode()) if whole else byte_ids(part)
    pieces = stream(bpe, ids)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("text", ["ď", "客单价", "😀", "👨‍👩‍👧"])
def test_character_cut_by_the_end_appears_once_as_one_shot_decoding_shows_it(
    bpe: Tokenizer, text: str
) -> None:
    ids = byte_ids(text.encode()[:-1])
    pieces = stream(bpe, ids)
    assert "".join(pieces[:-1]) == text[:-1]
    assert pieces[-1] == "\ufffd"


def test_token_that_ends_one_character_and_begins_the_next(bpe: Tokenizer) -> None:
    one, two, three = "客单价".encode()[:2], "客单价".encode()[2:4], "客单价".encode()[4:]
    raw = RawTokenizer.from_str(trained_bpe().to_str())
    letters = bytes_to_letters()
    tokens = ["".join(letters[byte] for byte in part) for part in (one, two, three)]
    raw.add_tokens(tokens)
    pieces = []

    class Raw:
        def is_special(self, token_id: int) -> bool:
            return False

        def is_known(self, token_id: int) -> bool:
            return True

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return raw.decode(ids)

    detokenizer = Detokenizer(Raw())  # type: ignore[arg-type]
    pieces = [detokenizer.push(raw.token_to_id(token)) for token in tokens]
    assert [*pieces, detokenizer.flush()] == ["", "客", "单价", ""]


def test_invalid_bytes_do_not_stall_the_stream(bpe: Tokenizer) -> None:
    detokenizer = Detokenizer(bpe)
    shown = ""
    for index, token_id in enumerate(byte_ids(b"ok" + b"\xff" * 200)):
        shown += detokenizer.push(token_id)
        assert len(shown) >= index + 1 - 3
    assert detokenizer.push(byte_ids(b"!")[0]) == "\ufffd" * 3 + "!"


def test_special_tokens_inside_a_character_are_skipped(bpe: Tokenizer) -> None:
    ids = byte_ids("客".encode())
    assert "".join(stream(bpe, [ids[0], 0, *ids[1:], 0, 10_000])) == "客"


def test_cost_of_a_token_does_not_grow_with_the_answer() -> None:
    longest = 0

    class Counting:
        def is_special(self, token_id: int) -> bool:
            return False

        def is_known(self, token_id: int) -> bool:
            return True

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return "\ufffd" * len(ids)

    detokenizer = Detokenizer(Counting())  # type: ignore[arg-type]
    for _ in range(2_000):
        detokenizer.push(0)
    assert longest <= 32


# ---- stop strings


def match(pieces: list[str], *stops: str) -> tuple[list[str], str | None]:
    """Pieces shown, and the stop string found."""
    matcher, shown = StopMatcher(stops), []
    for piece in pieces:
        found = matcher.push(piece)
        if isinstance(found, StopMatch):
            return [*shown, found.text], found.stop
        shown.append(found)
    return [*shown, matcher.flush()], None


def first_completed(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, letter by letter."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_stop_string_over_several_pieces_is_cut_exactly() -> None:
    shown, stop = match(["a", " be", "ta ga", "mma d"], "beta gamma")
    assert (shown, stop) == (["a", " ", "", ""], "beta gamma")


def test_text_that_shares_a_beginning_with_a_stop_string_is_released() -> None:
    assert match(["Qu", "i", "ck"], "Question:") == (["", "Qui", "ck", ""], None)
    assert match(["Qui", "ck"], "Question:") == (["Qui", "ck", ""], None)


def test_text_held_back_at_the_end_is_released() -> None:
    assert match(["say Quest"], "Question:") == (["say ", "Quest"], None)


@pytest.mark.parametrize("pieces", [["xabc"], ["xa", "bc"], ["x", "a", "b", "c"]])
def test_a_stop_string_that_begins_another_wins_by_being_complete_first(pieces: list[str]) -> None:
    shown, stop = match(pieces, "abc", "ab")
    assert ("".join(shown), stop) == ("x", "ab")


@pytest.mark.parametrize("pieces", [["xabc"], ["xa", "bc"], ["x", "a", "b", "c"]])
def test_of_stop_strings_that_end_together_the_longest_wins(pieces: list[str]) -> None:
    shown, stop = match(pieces, "bc", "abc")
    assert ("".join(shown), stop) == ("x", "abc")


def test_stop_string_equal_to_one_piece_and_at_the_very_end() -> None:
    assert match(["hello", "END"], "END") == (["hello", ""], "END")


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_stop_outcome_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    shown, stop = match(pieces, *stops)
    assert ("".join(shown), stop) == first_completed("".join(pieces), stops)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_nothing_is_held_back_that_cannot_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(tuple(stops)), ""
    for index, letter in enumerate(text):
        found = matcher.push(letter)
        if isinstance(found, StopMatch):
            return
        shown += found
        held = text[len(shown) : index + 1]
        assert not held or any(stop.startswith(held) for stop in stops)
