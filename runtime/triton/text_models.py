"""`preprocessing` and `postprocessing`: texts to token ids and back, as tensors.

Owns the tensors of both models; leaves the tokens of a text to `tokenizer` and the text of a
growing answer to the model that grows it. Invariant: both are without state, so that any
number of callers may use them in any order.

A stream's text is made where the stream is: `tensorrt_llm` knows the tokens before a chunk, and
so where a character, a space or a stop text ends. It sends the text along, and `postprocessing`
takes it as it is; ids alone are decoded as whole answers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from looptrt.errors import ManifestError, RequestError
from looptrt.runtime.tokenizer import Tokenizer
from looptrt.runtime.triton.engine_files import read_manifest
from looptrt.runtime.triton.requests import Inputs, check_inputs, text_of
from looptrt.runtime.triton.responses import Outputs
from looptrt.runtime.triton.tensors import POSTPROCESSING, PREPROCESSING

_NO_ID = -1


class Preprocessing:
    """Prompts and words to token ids.

    Args:
        engine_dir: has the tokenizer and the model's end and pad ids.

    Raises:
        ManifestError: there is no tokenizer, or the directory is damaged.
    """

    def __init__(self, engine_dir: Path) -> None:
        self._tokenizer = _tokenizer_of(engine_dir)
        manifest = read_manifest(engine_dir)
        self._vocab_size = manifest.spec.vocab_size
        self._max_input_len = manifest.limits.max_input_len
        self._end_id = next(iter(manifest.tokens.eos), _NO_ID)
        self._pad_id = self._end_id if manifest.tokens.pad is None else manifest.tokens.pad

    def run(self, inputs: Inputs) -> Outputs:
        """The model's outputs for a request of any number of rows.

        Raises:
            RequestError: a tensor is missing, refused or not text, or a prompt is too long: its
                ids would fill the shared memory on their way to the engine, which refuses it.
        """
        check_inputs(inputs, PREPROCESSING)
        texts = [text_of(row.reshape(-1)[0], "QUERY") for row in inputs["QUERY"]]
        for text in texts:
            self._tokenizer.check_length("prompt", text, self._max_input_len)
        prompts = [self._tokenizer.encode(text) for text in texts]
        longest = max(map(len, prompts))
        if longest > self._max_input_len:
            raise RequestError(
                f"prompt: expected at most max_input_len {self._max_input_len} tokens, "
                f"got {longest}"
            )
        ids = np.full((len(prompts), longest), max(self._pad_id, 0), np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
        num_rows = len(prompts)
        return {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": np.array([[len(prompt)] for prompt in prompts], np.int32),
            "BAD_WORDS_IDS": self._word_lists(inputs, "BAD_WORDS_DICT", num_rows),
            "STOP_WORDS_IDS": self._word_lists(inputs, "STOP_WORDS_DICT", num_rows),
            "EMBEDDING_BIAS": self._bias(inputs, num_rows),
            "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"],
            "OUT_END_ID": inputs.get("END_ID", np.full((num_rows, 1), self._end_id, np.int32)),
            "OUT_PAD_ID": inputs.get("PAD_ID", np.full((num_rows, 1), self._pad_id, np.int32)),
        }

    def _word_lists(self, inputs: Inputs, name: str, num_rows: int) -> np.ndarray:
        """[rows, 2, n]: ids of all words of a row, then where each one ends; 0 and -1 fill up."""
        rows = inputs[name] if name in inputs else np.empty((num_rows, 0), object)
        encoded = [[self._words(text_of(word, name)) for word in row.flat] for row in rows]
        longest = max(sum(map(len, words)) for words in encoded)
        lists = np.zeros((num_rows, 2, longest), np.int32)
        lists[:, 1] = -1
        for row, words in enumerate(encoded):
            ends = np.cumsum([len(word) for word in words if word])
            lists[row, 0, : sum(map(len, words))] = [token for word in words for token in word]
            lists[row, 1, : len(ends)] = ends
        return lists

    def _words(self, word: str) -> list[int]:
        return self._tokenizer.encode(word, add_special_tokens=False) if word else []

    def _bias(self, inputs: Inputs, num_rows: int) -> np.ndarray:
        """[rows, vocabulary] sums of the weights of each token's words; [rows, 0] without any."""
        words, weights = inputs.get("EMBEDDING_BIAS_WORDS"), inputs.get("EMBEDDING_BIAS_WEIGHTS")
        if words is None and weights is None:
            return np.empty((num_rows, 0), np.float32)
        if words is None or weights is None or words.shape != weights.shape:
            raise RequestError(
                "EMBEDDING_BIAS_WORDS, EMBEDDING_BIAS_WEIGHTS: expected as many words as weights"
            )
        bias = np.zeros((num_rows, self._vocab_size), np.float32)
        for row in range(num_rows):
            for word, weight in zip(words[row].flat, weights[row].flat, strict=True):
                for token_id in self._words(text_of(word, "EMBEDDING_BIAS_WORDS")):
                    bias[row, token_id] += weight
        return bias


class Postprocessing:
    """Token ids of whole answers to text; text that is known stays as it is.

    Args:
        engine_dir: has the tokenizer.
        skip_special_tokens: leave special tokens out.

    Raises:
        ManifestError: there is no tokenizer, or it is damaged.
    """

    def __init__(self, engine_dir: Path, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = _tokenizer_of(engine_dir)
        self._skip_special_tokens = skip_special_tokens

    def run(self, inputs: Inputs) -> Outputs:
        """The model's outputs for a request of any number of rows and answers.

        Raises:
            RequestError: a tensor is missing, or a length is beyond the ids.
        """
        if "TEXT" in inputs:
            return {"OUTPUT": inputs["TEXT"]}
        check_inputs(inputs, POSTPROCESSING)
        ids, lengths = inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"]
        if lengths.shape != ids.shape[:2] or (lengths < 0).any() or (lengths > ids.shape[2]).any():
            raise RequestError(
                f"SEQUENCE_LENGTH: expected shape {list(ids.shape[:2])} and at most "
                f"{ids.shape[2]}, as in TOKENS_BATCH, got {lengths.tolist()}"
            )
        texts = [
            [self._decode(answer[:length]) for answer, length in zip(*row, strict=True)]
            for row in zip(ids, lengths, strict=True)
        ]
        return {"OUTPUT": np.array(texts, object)}

    def _decode(self, token_ids: np.ndarray) -> bytes:
        known = [token_id for token_id in token_ids.tolist() if token_id >= 0]
        text = self._tokenizer.decode(known, skip_special_tokens=self._skip_special_tokens)
        return text.encode()


def _tokenizer_of(engine_dir: Path) -> Tokenizer:
    tokenizer = Tokenizer.of_engine(engine_dir)
    if tokenizer is None:
        raise ManifestError(f"{engine_dir}: has no tokenizer.json; only tensorrt_llm can serve it")
    return tokenizer
