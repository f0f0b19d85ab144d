"""Every tensor of the model repository: the one table behind config.pbtxt, code and docs.

Owns names, types, shapes, which are optional and why some are refused; leaves their meaning
to `requests` and `responses`. Invariant: names, types and shapes are TensorRT-LLM's, except
for the tensors marked as ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

DType = Literal["BOOL", "UINT8", "UINT64", "INT32", "INT64", "FP16", "FP32", "BYTES"]

NUMPY_TYPES: Mapping[DType, str] = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT64": "uint64",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "BYTES": "object",
}


@dataclass(frozen=True)
class Refusal:
    """Why a tensor of TensorRT-LLM is not served.

    Attributes:
        reason: for the error.
        neutral: values that change nothing and are accepted; clients send them as defaults.
    """

    reason: str
    neutral: tuple[float, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """One input or output of a model.

    Attributes:
        dims: without the batch dimension; -1 is any length.
        text: what it is, in a line.
        is_ours: not one of TensorRT-LLM's.
    """

    name: str
    dtype: DType
    dims: tuple[int, ...]
    text: str
    optional: bool = True
    is_ours: bool = False
    refusal: Refusal | None = None

    def called(self, name: str) -> Tensor:
        """The same tensor under another model's name for it."""
        return replace(self, name=name)


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of one model, in the order of its config.pbtxt."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def input(self, name: str) -> Tensor:
        """The input of that name."""
        return next(tensor for tensor in self.inputs if tensor.name == name)

    def output(self, name: str) -> Tensor:
        """The output of that name."""
        return next(tensor for tensor in self.outputs if tensor.name == name)


_ONE = (1,)
_ANY = (-1,)
_NO_BEAMS = "there is no beam search; answers are sampled"
_NO_DECAY = "top_p does not decay"
_NO_LORA = "engines have no LoRA adapters"
_NO_PROMPT_TABLE = "prompts are token ids only, without embedding tables"
_NO_GUIDE = "answers are not constrained by a grammar"
_NO_ENCODER = "looped models are decoders without an encoder"
_NO_DRAFT = "drafts from outside are not verified"
_NO_RETENTION = "cached pages leave in the order of their last use"
_NO_LOOKAHEAD = "there is no lookahead decoding"
_LOGITS_STAY = "logits stay in the engine; use return_log_probs"


def _int(name: str, text: str) -> Tensor:
    return Tensor(name, "INT32", _ONE, text)


def _float(name: str, text: str) -> Tensor:
    return Tensor(name, "FP32", _ONE, text)


def _flag(name: str, text: str) -> Tensor:
    return Tensor(name, "BOOL", _ONE, text)


def _ours(tensor: Tensor) -> Tensor:
    return replace(tensor, is_ours=True)


def _needed(tensor: Tensor) -> Tensor:
    return replace(tensor, optional=False)


def _refused(
    name: str,
    dtype: DType,
    dims: tuple[int, ...],
    reason: str,
    neutral: tuple[float, ...] = (),
) -> Tensor:
    accepted = f" (accepted: {', '.join(f'{value:g}' for value in neutral)})" if neutral else ""
    return Tensor(name, dtype, dims, f"{reason}{accepted}", refusal=Refusal(reason, neutral))


# ---- tensorrt_llm

_BEAMS = _refused("beam_width", "INT32", _ONE, _NO_BEAMS, (1,))
_LEN_PENALTY = _refused("len_penalty", "FP32", _ONE, _NO_BEAMS, (0, 1))
_CONTEXT_LOGITS = _refused("return_context_logits", "BOOL", _ONE, _LOGITS_STAY, (0,))
_GENERATION_LOGITS = _refused("return_generation_logits", "BOOL", _ONE, _LOGITS_STAY, (0,))
_PROMPT_TABLE = _refused("prompt_embedding_table", "FP16", (-1, -1), _NO_PROMPT_TABLE)
_PROMPT_VOCAB = _refused("prompt_vocab_size", "INT32", _ONE, _NO_PROMPT_TABLE)
_LORA = (
    _refused("lora_task_id", "UINT64", _ONE, _NO_LORA),
    _refused("lora_weights", "FP16", (-1, -1), _NO_LORA),
    _refused("lora_config", "INT32", (-1, 3), _NO_LORA),
)
_GUIDE = (
    _refused("guided_decoding_guide_type", "BYTES", _ONE, _NO_GUIDE),
    _refused("guided_decoding_guide", "BYTES", _ONE, _NO_GUIDE),
)

_END_ID = _int("end_id", "ends the answer beside the model's own; -1: nothing but stops does")
_PAD_ID = _int("pad_id", "accepted and unused: nothing is padded")
_TOP_K = _int("runtime_top_k", "keep the k most likely tokens; 0 keeps all, 1 is greedy")
_TOP_P = _float("runtime_top_p", "keep tokens up to this probability; 0 or less keeps all")
_TEMPERATURE = _float("temperature", "default: 1 with top_k above 1 or top_p, else greedy")
_PENALTIES = (
    _float("repetition_penalty", "above 1 makes known tokens less likely"),
    _float("presence_penalty", "off the logits of the answer's tokens"),
    _float("frequency_penalty", "the same each time a token came"),
)
_MIN_TOKENS = _int("min_tokens", "new tokens before the answer may end")
_SEED = Tensor("seed", "UINT64", _ONE, "of the draws, below 2**63; default: a fresh one")
_SEQUENCES = _int("num_return_sequences", "answers, each in responses of its own")
_EXCLUDE = _flag(
    "exclude_input_in_output",
    "leave the prompt out of a whole answer; a stream never has it",
)
_RETURNS = (
    _flag("return_log_probs", "cum_log_probs and output_log_probs in every response"),
    _CONTEXT_LOGITS,
    _GENERATION_LOGITS,
    _flag("return_perf_metrics", "kv_cache_* counts and *_time_ns stamps, in the last response"),
    _flag("return_num_input_tokens", "num_input_tokens in every response"),
    _flag("return_num_output_tokens", "num_output_tokens in every response"),
)
_OUR_INPUTS = tuple(
    _ours(tensor)
    for tensor in (
        _float("min_p", "drop tokens below this times the most likely one"),
        _int("loops", "S, loops of generated tokens"),
        _int("prefill_loops", "P, loops of prompt tokens but the last"),
        _float("exit_threshold", "exit probability at which a token stops looping"),
        Tensor("cache_salt", "BYTES", _ONE, "requests share cached pages only under equal salts"),
        _int("priority", "higher runs first"),
        Tensor("noise_seed", "UINT64", _ONE, "of the random initial state"),
    )
)

_LLM_INPUTS = (
    _needed(Tensor("input_ids", "INT32", _ANY, "token ids of the prompt")),
    _needed(_int("input_lengths", "how many of input_ids count")),
    _needed(_int("request_output_len", "new tokens at most")),
    _SEQUENCES,
    _END_ID,
    _PAD_ID,
    Tensor("stop_words_list", "INT32", (2, -1), "ids of all sequences, then each one's end, -1"),
    Tensor("bad_words_list", "INT32", (2, -1), "the same, of sequences that never come"),
    Tensor("embedding_bias", "FP32", _ANY, "added to the logits; empty is none"),
    _BEAMS,
    _TEMPERATURE,
    _TOP_K,
    _TOP_P,
    _refused("runtime_top_p_min", "FP32", _ONE, _NO_DECAY, (0, 1e-6)),
    _refused("runtime_top_p_decay", "FP32", _ONE, _NO_DECAY, (0, 1)),
    _int("runtime_top_p_reset_ids", "accepted and unused: top_p does not decay"),
    _LEN_PENALTY,
    _flag("early_stopping", "accepted and unused: there is no beam search"),
    _PENALTIES[0],
    _MIN_TOKENS,
    _refused("beam_search_diversity_rate", "FP32", _ONE, _NO_BEAMS, (0,)),
    *_PENALTIES[1:],
    _SEED,
    *_RETURNS,
    _EXCLUDE,
    _flag("stop", "end the running requests that have this request's id"),
    _flag("streaming", "responses as tokens come; each holds all that is new"),
    _refused("encoder_input_features", "FP16", (-1, -1), _NO_ENCODER),
    _refused("encoder_output_lengths", "INT32", _ONE, _NO_ENCODER),
    _refused("decoder_input_ids", "INT32", _ANY, _NO_ENCODER),
    _refused("decoder_input_lengths", "INT32", _ONE, _NO_ENCODER),
    _refused("cross_attention_mask", "BOOL", (-1, -1), _NO_ENCODER),
    _refused("skip_cross_attn_blocks", "BOOL", _ONE, _NO_ENCODER, (0,)),
    _refused("draft_input_ids", "INT32", _ANY, _NO_DRAFT),
    _refused("draft_logits", "FP32", (-1, -1), _NO_DRAFT),
    _refused("draft_acceptance_threshold", "FP32", _ONE, _NO_DRAFT),
    _PROMPT_TABLE,
    _refused("prompt_table_extra_ids", "UINT64", _ANY, _NO_PROMPT_TABLE),
    _PROMPT_VOCAB,
    _refused("mrope_rotary_cos_sin", "FP32", _ANY, _NO_PROMPT_TABLE),
    _refused("mrope_position_deltas", "INT64", _ONE, _NO_PROMPT_TABLE),
    *_LORA,
    _refused("context_phase_params", "UINT8", _ANY, "prefill and decode run in one engine"),
    _refused("retention_token_range_starts", "INT32", _ANY, _NO_RETENTION),
    _refused("retention_token_range_ends", "INT32", _ANY, _NO_RETENTION),
    _refused("retention_token_range_priorities", "INT32", _ANY, _NO_RETENTION),
    _refused("retention_token_range_durations_ms", "INT32", _ANY, _NO_RETENTION),
    _refused("retention_decode_priority", "INT32", _ONE, _NO_RETENTION),
    _refused("retention_decode_duration_ms", "INT32", _ONE, _NO_RETENTION),
    *_GUIDE,
    _refused("lookahead_window_size", "INT32", _ONE, _NO_LOOKAHEAD),
    _refused("lookahead_ngram_size", "INT32", _ONE, _NO_LOOKAHEAD),
    _refused("lookahead_verification_set_size", "INT32", _ONE, _NO_LOOKAHEAD),
    _ours(Tensor("stop_words", "BYTES", _ANY, "texts that end the answer; no part of its text")),
    _ours(Tensor("bad_words", "BYTES", _ANY, "texts that never come")),
    *_OUR_INPUTS,
)

_SHARED_OUTPUTS = (
    Tensor("cum_log_probs", "FP32", _ANY, "log-probability of the answer so far"),
    Tensor("output_log_probs", "FP32", (-1, -1), "of each new token"),
    Tensor("context_logits", "FP32", (-1, -1), f"never sent: {_LOGITS_STAY}"),
    Tensor("generation_logits", "FP32", (-1, -1, -1), f"never sent: {_LOGITS_STAY}"),
    _int("batch_index", "row of the request, where it has several"),
    _int("sequence_index", "which of num_return_sequences, where there are several"),
    _int("kv_cache_alloc_new_blocks", "pages that the request filled itself"),
    _int("kv_cache_reused_blocks", "pages that it found in the prefix cache"),
    _int("kv_cache_alloc_total_blocks", "the sum of both"),
    Tensor("arrival_time_ns", "INT64", _ONE, "CLOCK_MONOTONIC, as all stamps"),
    Tensor("first_scheduled_time_ns", "INT64", _ONE, "first step with a token of the request"),
    Tensor("first_token_time_ns", "INT64", _ONE, "end of the step of the first new token"),
    Tensor("last_token_time_ns", "INT64", _ONE, "end of the step of the last one"),
    _int("num_input_tokens", "of the prompt"),
    _int("num_output_tokens", "generated so far"),
    _ours(Tensor("finish_reason", "BYTES", _ONE, "stop, length or abort; in the last response")),
    _ours(Tensor("stop_reason", "BYTES", _ONE, "the text or token id that ended the answer")),
    _ours(Tensor("loops_used", "INT32", _ANY, "loops run to make each new token")),
    _ours(_int("num_cached_tokens", "prompt tokens from the prefix cache; in the last response")),
)

_LLM_OUTPUTS = (
    Tensor("output_ids", "INT32", (-1, -1), "token ids, new ones in a stream, the stop included"),
    Tensor("sequence_length", "INT32", _ANY, "how many there are"),
    *_SHARED_OUTPUTS,
    _ours(Tensor("text", "BYTES", _ANY, "their text, as far as it is certain")),
    _ours(
        Tensor(
            *("stop_key", "BYTES", _ONE),
            "a `stop` with this as its id ends the request; empty in most responses but the first",
        )
    ),
)

# ---- preprocessing and postprocessing

_PREPROCESSING_INPUTS = (
    _needed(Tensor("QUERY", "BYTES", _ONE, "the prompt")),
    _refused("DECODER_QUERY", "BYTES", _ONE, _NO_ENCODER),
    _needed(_int("REQUEST_OUTPUT_LEN", "new tokens at most")),
    Tensor("BAD_WORDS_DICT", "BYTES", _ANY, "texts that never come"),
    Tensor("STOP_WORDS_DICT", "BYTES", _ANY, "texts that end the answer"),
    Tensor("EMBEDDING_BIAS_WORDS", "BYTES", _ANY, "texts whose tokens get a bias"),
    Tensor("EMBEDDING_BIAS_WEIGHTS", "FP32", _ANY, "the bias of each of them"),
    _END_ID.called("END_ID"),
    _PAD_ID.called("PAD_ID"),
    _refused("PROMPT_TABLE_EXTRA_ID", "UINT64", _ONE, _NO_PROMPT_TABLE),
)
_PREPROCESSING_OUTPUTS = (
    Tensor("INPUT_ID", "INT32", _ANY, "token ids of the prompt, padded behind"),
    _int("REQUEST_INPUT_LEN", "how many there are"),
    Tensor("BAD_WORDS_IDS", "INT32", (2, -1), "for bad_words_list"),
    Tensor("STOP_WORDS_IDS", "INT32", (2, -1), "for stop_words_list"),
    Tensor("EMBEDDING_BIAS", "FP32", _ANY, "for embedding_bias; empty without words"),
    Tensor("REQUEST_OUTPUT_LEN", "INT32", _ANY, "as it came"),
    _int("OUT_END_ID", "END_ID, or the model's"),
    _int("OUT_PAD_ID", "PAD_ID, or the model's"),
)

_POSTPROCESSING_INPUTS = (
    _needed(Tensor("TOKENS_BATCH", "INT32", (-1, -1), "token ids of answers")),
    _needed(Tensor("SEQUENCE_LENGTH", "INT32", _ANY, "how many count of each")),
    _ours(Tensor("TEXT", "BYTES", _ANY, "their text, where it is known: it is taken as it is")),
    _ours(
        Tensor(
            "STOP_KEY",
            "BYTES",
            _ONE,
            "of a request, to end it if it is cancelled; empty: nobody looks",
        )
    ),
)
_POSTPROCESSING_OUTPUTS = (Tensor("OUTPUT", "BYTES", _ANY, "the answers' text"),)

# ---- ensemble and tensorrt_llm_bls

_OUTPUT_LEN = _int("max_tokens", "new tokens at most")
_TEXT_INPUTS = (
    _needed(Tensor("text_input", "BYTES", _ONE, "the prompt")),
    _refused("decoder_text_input", "BYTES", _ONE, _NO_ENCODER),
    _needed(_OUTPUT_LEN),
    _SEQUENCES,
    Tensor("bad_words", "BYTES", _ANY, "texts that never come; empty ones count for nothing"),
    Tensor("stop_words", "BYTES", _ANY, "texts that end the answer and are no part of it"),
    _EXCLUDE,
    _END_ID,
    _PAD_ID,
    _TOP_K.called("top_k"),
    _TOP_P.called("top_p"),
    _TEMPERATURE,
    _LEN_PENALTY.called("length_penalty"),
    _PENALTIES[0],
    _MIN_TOKENS,
    *_PENALTIES[1:],
    _SEED,
    *_RETURNS,
    _BEAMS,
    _flag("stream", "responses as tokens come; each holds all that is new"),
    _PROMPT_TABLE,
    _refused("prompt_table_extra_id", "UINT64", _ONE, _NO_PROMPT_TABLE),
    _PROMPT_VOCAB,
    Tensor("embedding_bias_words", "BYTES", _ANY, "texts whose tokens get a bias"),
    Tensor("embedding_bias_weights", "FP32", _ANY, "the bias of each of them"),
    *_LORA,
    *_GUIDE,
    *_OUR_INPUTS,
)
_TEXT_OUTPUTS = (Tensor("text_output", "BYTES", _ANY, "text, new in a stream"), *_SHARED_OUTPUTS)
_BLS_INPUTS = (
    *_TEXT_INPUTS,
    _refused("num_draft_tokens", "INT32", _ONE, _NO_DRAFT, (0,)),
    _refused("use_draft_logits", "BOOL", _ONE, _NO_DRAFT, (0,)),
)

PREPROCESSING = ModelTensors(_PREPROCESSING_INPUTS, _PREPROCESSING_OUTPUTS)
TENSORRT_LLM = ModelTensors(_LLM_INPUTS, _LLM_OUTPUTS)
POSTPROCESSING = ModelTensors(_POSTPROCESSING_INPUTS, _POSTPROCESSING_OUTPUTS)
ENSEMBLE = ModelTensors(_TEXT_INPUTS, _TEXT_OUTPUTS)
TENSORRT_LLM_BLS = ModelTensors(_BLS_INPUTS, _TEXT_OUTPUTS)

MODELS: Mapping[str, ModelTensors] = {
    "preprocessing": PREPROCESSING,
    "tensorrt_llm": TENSORRT_LLM,
    "postprocessing": POSTPROCESSING,
    "ensemble": ENSEMBLE,
    "tensorrt_llm_bls": TENSORRT_LLM_BLS,
}

# Inputs of the text models and what each of the models behind them calls it.
TO_PREPROCESSING: Mapping[str, str] = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
}
FROM_PREPROCESSING: Mapping[str, str] = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}
TO_POSTPROCESSING: Mapping[str, str] = {
    "output_ids": "TOKENS_BATCH",
    "sequence_length": "SEQUENCE_LENGTH",
    "text": "TEXT",
    "stop_key": "STOP_KEY",
}
_RENAMED = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}


def _straight(inputs: Iterable[Tensor]) -> dict[str, str]:
    elsewhere = {*TO_PREPROCESSING, "num_draft_tokens", "use_draft_logits"}
    names = (tensor.name for tensor in inputs if tensor.name not in elsewhere)
    return {name: _RENAMED.get(name, name) for name in names}


TO_TENSORRT_LLM: Mapping[str, str] = _straight(_TEXT_INPUTS)
SHARED_OUTPUTS: tuple[str, ...] = tuple(tensor.name for tensor in _SHARED_OUTPUTS)
