"""Every flag of `trtllm-build`, and what becomes of it here.

Owns names, defaults, accepted values and reasons; leaves reading command lines and files to
`flags` and their description to `flag_docs`. Invariant: a flag acts, or is accepted at the
values that are what we do anyway, or is refused with a reason; none is read and ignored.

Names, forms and defaults are those of TensorRT-LLM 1.2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from looptrt.errors import BuildError
from looptrt.loop_spec import NoiseMode

LOG_LEVELS = {
    "internal_error": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}


_BOOLEANS = {"true": "enable", "false": "disable"}


class Form(StrEnum):
    """How a flag stands on a command line."""

    VALUE = "value"
    SWITCH = "switch"
    LIST = "list"
    NONE = "none"  # only a key of a --build_config file


class Section(StrEnum):
    """Where a flag stands in a --build_config file."""

    BUILD = "build_config"
    PLUGIN = "plugin_config"
    NONE = "nowhere"


@dataclass(frozen=True)
class Flag:
    """One flag, or one key of a --build_config file.

    Values are words: booleans are `enable` and `disable`, however they were written.

    Attributes:
        name: without dashes.
        default: TensorRT-LLM's, None if it has none; for our own flags ours.
        note: what it does, or why other values are refused.
        read: makes a value of its word if the flag acts; raises ValueError saying what was
            expected.
        accepts: words that are what we do anyway.
        here: our default where it is another.
        key: its name in a --build_config file.
    """

    name: str
    default: str | None
    note: str
    read: Callable[[str], Any] | None = None
    accepts: tuple[str, ...] = ()
    form: Form = Form.VALUE
    section: Section = Section.BUILD
    here: str | None = None
    aliases: tuple[str, ...] = ()
    key: str = ""

    @property
    def verdict(self) -> str:
        """What becomes of it, in words."""
        if self.read is not None:
            return "acts"
        usable = () if self.form is Form.SWITCH else self.accepts
        return f"accepted: {', '.join(usable)}" if usable else "refused"

    def value_of(self, word: str) -> Any:  # noqa: ANN401 - each flag has a type of its own
        """The value of a word; None for one that changes nothing.

        Raises:
            BuildError: the word is malformed, or asks for what is not done here.
        """
        if self.read is None:
            if _BOOLEANS.get(word.lower(), word.lower()) not in self.accepts:
                given = "" if self.form in (Form.SWITCH, Form.LIST) else f" {word}"
                raise BuildError(f"--{self.name}{given}: {self.note}{self._advice()}")
            return None
        try:
            return self.read(word)
        except ValueError as error:
            raise BuildError(f"--{self.name} {word}: expected {error}") from None

    def _advice(self) -> str:
        is_usable = self.accepts and self.form is Form.VALUE
        return f"; accepted: {', '.join(self.accepts)}" if is_usable else ""


def _integer(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError("an integer") from None


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 604_800:
        raise ValueError("seconds, from above 0 to a week")
    return seconds


def _switch(word: str) -> bool:
    if word not in ("enable", "disable"):
        raise ValueError("no value")
    return word == "enable"


def _one_of(words: Mapping[str, Any] | type[StrEnum]) -> Callable[[str], Any]:
    choices = {str(word): word for word in words} if isinstance(words, type) else words

    def read(word: str) -> Any:  # noqa: ANN401 - the choices' values
        if word not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return choices[word]

    return read


def _kv_cache_type(word: str) -> None:
    reasons = {
        "continuous": "paged, as the KV of a looped model is allocated in plane units of pages",
        "disabled": "paged, as every loop reads the KV that the loops before it wrote",
    }
    if word.lower() != "paged":
        raise ValueError(reasons.get(word.lower(), "paged"))


_PROFILES = "an engine always has two optimisation profiles, prefill and decode"
_TENSORRT = "with --backend tensorrt or tensorrt_rtx:"
_VERBOSITIES = {word: word for word in ("layer_names_only", "detailed", "none")}
_NO_LORA = "LoRA is not supported"
_NO_QUANTISATION = "quantisation is not supported"
_ONE_GPU = "an engine runs on one GPU"
_LOGIT_ROWS = (
    "which rows reach the head is decided by each request at run time, not by the build; whole "
    "logits are not returned"
)
_SPECULATION = "speculation is chosen at run time and needs no draft in the engine"
_ATTENTION = "attention is always the plugin packed_plane_attention"
_PLUGIN, _FILE_ONLY = Section.PLUGIN, Form.NONE
_ON, _OFF = ("enable",), ("disable",)
_ZERO = "0"  # a switch that is off, in files that write it as a number
_EITHER = ("enable", "disable")
_UNUSED = ("auto", "disable")


def _plugin(name: str, default: str | None, note: str, accepts: tuple[str, ...]) -> Flag:
    return Flag(name, default, note, accepts=accepts, section=_PLUGIN)


def _hidden(name: str, default: str | None, note: str, accepts: tuple[str, ...]) -> Flag:
    return Flag(name, default, note, accepts=accepts, section=_PLUGIN, form=_FILE_ONLY)


def _refused_switch(name: str, note: str, key: str = "") -> Flag:
    return Flag(name, None, note, accepts=(*_OFF, _ZERO), form=Form.SWITCH, key=key)


GROUPS: dict[str, tuple[Flag, ...]] = {
    "Model and output": (
        Flag(
            "checkpoint_dir",
            None,
            "Hugging Face or TensorRT-LLM checkpoint directory",
            read=Path,
            section=Section.NONE,
        ),
        Flag(
            "model_config",
            None,
            "config.json alone, of either layout: the engine gets random weights of a fixed "
            "seed, for measuring",
            read=Path,
            section=Section.NONE,
        ),
        Flag(
            "build_config",
            None,
            "JSON file in TensorRT-LLM's layout; flags on the command line override it",
            read=Path,
            section=Section.NONE,
        ),
        Flag(
            "model_cls_file",
            None,
            "Python file that defines a family; it is executed",
            read=Path,
            section=Section.NONE,
        ),
        Flag(
            "model_cls_name",
            None,
            "the family's name in that file",
            read=str,
            section=Section.NONE,
        ),
        Flag(
            "output_dir",
            "engine_outputs",
            "engine directory; one that is there is replaced when the build succeeds",
            read=Path,
            section=Section.NONE,
        ),
        Flag(
            "workers",
            "1",
            "threads that convert weights; each holds one tensor",
            read=_integer,
            section=Section.NONE,
        ),
        Flag(
            "log_level",
            "info",
            f"least severe message shown: {', '.join(LOG_LEVELS)}",
            read=_one_of(LOG_LEVELS),
            section=Section.NONE,
        ),
        Flag(
            "dry_run",
            "false",
            "check everything, print the plan, write nothing",
            read=_switch,
            form=Form.SWITCH,
        ),
        Flag(
            "monitor_memory",
            "false",
            "log the peak memory of the build",
            read=_switch,
            form=Form.SWITCH,
        ),
    ),
    "Limits": (
        Flag(
            "max_batch_size",
            "2048",
            "requests that run at the same time; there it counts rows of a profile, 128 is "
            "beyond what a GPU holds of looped models' KV",
            read=_integer,
            here="128",
        ),
        Flag(
            "max_input_len",
            "1024",
            "longest prompt; by default no longer than max_seq_len",
            read=_integer,
        ),
        Flag(
            "max_seq_len",
            None,
            "longest prompt and answer together; by default the model's positions",
            read=_integer,
            aliases=("max_decoder_seq_len",),
        ),
        Flag("max_num_tokens", "8192", "tokens of one step, all requests together", read=_integer),
        Flag("tokens_per_block", "32", "tokens of a KV page", read=_integer, section=_PLUGIN),
        Flag("kv_cache_type", "paged", "paged, the only kind", read=_kv_cache_type),
        Flag(
            "paged_kv_cache",
            None,
            "the KV of a looped model is allocated in plane units of pages",
            accepts=_ON,
            section=_PLUGIN,
        ),
        Flag("max_beam_width", "1", "beam search is not supported", accepts=("1",)),
        Flag(
            "opt_num_tokens",
            None,
            f"{_TENSORRT} tokens of a prefill step that kernels are chosen for; by default "
            "max_input_len",
            read=_integer,
        ),
        Flag(
            "opt_batch_size",
            "8",
            f"{_TENSORRT} requests of a step that kernels are chosen for",
            read=_integer,
            form=_FILE_ONLY,
        ),
        Flag("max_encoder_input_len", "1024", "looped models have no encoder", accepts=("1024",)),
        Flag(
            "max_prompt_embedding_table_size",
            "0",
            "prompt tuning and multimodal input are not supported",
            accepts=("0",),
            aliases=("max_multimodal_len",),
        ),
    ),
    "looptrt's own": (
        Flag(
            "backend",
            "auto",
            "pytorch, tensorrt, tensorrt_rtx, or auto = pytorch, which runs everywhere",
            read=str,
            section=Section.NONE,
        ),
        Flag(
            "max_loops",
            None,
            "most loops a request may ask for; may exceed the trained loops, which are the default",
            read=_integer,
            section=Section.NONE,
        ),
        Flag(
            "kv_planes",
            "latest",
            "planes of KV that the loops use: latest = one each, shared = one, compress-sN = a "
            "ring of N layer slots",
            read=str,
            section=Section.NONE,
        ),
        Flag(
            "noise",
            "position",
            "random initial state: position = a function of the position, sequential = drawn in "
            "sequence",
            read=_one_of(NoiseMode),
            section=Section.NONE,
        ),
        Flag(
            "dtype",
            None,
            "weights and activations, float32 or bfloat16; by default what the checkpoint declares",
            read=str,
            section=Section.NONE,
        ),
    ),
    "Logits": (
        Flag(
            "logits_dtype",
            None,
            "output of the head, float32 or bfloat16",
            read=str,
            section=Section.NONE,
            here="float32",
        ),
        _refused_switch("gather_context_logits", _LOGIT_ROWS),
        _refused_switch("gather_generation_logits", _LOGIT_ROWS),
        Flag(
            "gather_all_token_logits",
            None,
            _LOGIT_ROWS,
            form=Form.SWITCH,
            section=Section.NONE,
        ),
    ),
    "TensorRT engine": (
        Flag(
            "input_timing_cache",
            None,
            "with --backend tensorrt: timings of an earlier build; TensorRT-RTX has none",
            read=Path,
        ),
        Flag(
            "output_timing_cache",
            "model.cache",
            "with --backend tensorrt: where timings go; otherwise none are written",
            read=Path,
        ),
        Flag(
            "profiling_verbosity",
            "layer_names_only",
            f"{_TENSORRT} what an engine tells of its layers: {', '.join(_VERBOSITIES)}",
            read=_one_of(_VERBOSITIES),
        ),
        Flag(
            "strip_plan",
            None,
            f"{_TENSORRT} leave the weights out of the engines; they are put in from "
            "rank0.safetensors when an engine is loaded",
            read=_switch,
            form=Form.SWITCH,
            key="use_strip_plan",
        ),
        _refused_switch("weight_sparsity", "weights are dense"),
        _refused_switch("weight_streaming", "weights stay in GPU memory"),
        Flag(
            "fast_build",
            None,
            "engines are built one way, which takes minutes for the largest models",
            form=Form.SWITCH,
            section=Section.NONE,
        ),
        _refused_switch(
            "enable_debug_output", "run a phase through looptrt.builder.verify to see its tensors"
        ),
        Flag(
            "visualize_network",
            None,
            f"{_TENSORRT} folder for a JSON file a phase with the layers of the network that "
            "TensorRT parsed; the graphs themselves are rank0.*.onnx",
            read=Path,
        ),
        Flag(
            "compile_timeout",
            "3600",
            f"{_TENSORRT} seconds that a phase may take",
            read=_seconds,
            section=Section.NONE,
        ),
        Flag(
            "strongly_typed",
            "true",
            "every tensor keeps the dtype that the graph gives it",
            accepts=_ON,
            form=_FILE_ONLY,
        ),
        Flag("force_num_profiles", None, _PROFILES, form=_FILE_ONLY),
        Flag(
            "use_refit",
            "false",
            "an engine with other weights is another build",
            accepts=_OFF,
            form=_FILE_ONLY,
        ),
        Flag(
            "use_mrope",
            "false",
            "looped models take text only",
            accepts=_OFF,
            form=_FILE_ONLY,
        ),
    ),
    "LoRA": (
        Flag("lora_dir", None, _NO_LORA, form=Form.LIST, section=Section.NONE),
        Flag("lora_ckpt_source", "hf", _NO_LORA, accepts=("hf",), section=Section.NONE),
        Flag("lora_target_modules", None, _NO_LORA, form=Form.LIST, section=Section.NONE),
        Flag("max_lora_rank", "64", _NO_LORA, accepts=("64",), section=Section.NONE),
        _plugin("lora_plugin", "disable", _NO_LORA, _OFF),
        _plugin("dora_plugin", "disable", "DoRA is not supported", _OFF),
    ),
    "Speculative decoding": (
        Flag(
            "speculative_decoding_mode",
            None,
            f"{_SPECULATION} (files write no mode as 1)",
            accepts=("none", "1"),
        ),
        Flag("max_draft_len", "0", _SPECULATION, accepts=("0",)),
    ),
    "Plugins": (
        Flag(
            "gpt_attention_plugin",
            "auto",
            f"{_ATTENTION}, in the engine's dtype: auto, or that dtype",
            read=str,
            section=_PLUGIN,
        ),
        _plugin("bert_attention_plugin", "auto", "looped models have no encoder", _UNUSED),
        _plugin("gemm_plugin", "disable", "looptrt chooses what runs a matrix product", _UNUSED),
        _plugin("gemm_swiglu_plugin", "disable", "matrix products are never plugins", _OFF),
        _plugin("low_latency_gemm_plugin", "disable", "matrix products are never plugins", _OFF),
        _plugin(
            "low_latency_gemm_swiglu_plugin", "disable", "matrix products are never plugins", _OFF
        ),
        _plugin("fp8_rowwise_gemm_plugin", "disable", _NO_QUANTISATION, _OFF),
        _plugin("gemm_allreduce_plugin", "disable", _ONE_GPU, _OFF),
        _plugin("nccl_plugin", "auto", _ONE_GPU, _UNUSED),
        _plugin("moe_plugin", "auto", "looped models have no experts", _UNUSED),
        _plugin("mamba_conv1d_plugin", "auto", "looped models have no Mamba layers", _UNUSED),
        _plugin("context_fmha", "enable", _ATTENTION, _ON),
        _plugin("bert_context_fmha_fp32_acc", "disable", "looped models have no encoder", _OFF),
        _plugin("remove_input_padding", "enable", "inputs are always packed", _ON),
        _plugin("use_paged_context_fmha", "enable", "attention always reads paged KV", _ON),
        _plugin("use_fp8_context_fmha", "enable", "it changes quantised models only", _EITHER),
        _plugin("fuse_fp4_quant", "disable", _NO_QUANTISATION, _OFF),
        _plugin("multiple_profiles", "disable", _PROFILES, _OFF),
        _plugin("paged_state", "enable", "looped models have no RNN state", _EITHER),
        _plugin("streamingllm", "disable", "attention has no window and no sinks", _OFF),
        _plugin("norm_quant_fusion", "disable", _NO_QUANTISATION, _OFF),
        _plugin("reduce_fusion", "disable", _ONE_GPU, _OFF),
        _plugin("user_buffer", "disable", _ONE_GPU, _OFF),
        _plugin("use_fused_mlp", "enable", "gate and up are always one projection", _ON),
        _plugin("pp_reduce_scatter", "disable", _ONE_GPU, _OFF),
        _hidden("identity_plugin", "disable", "no graph has such a node", _OFF),
        _hidden("manage_weights", "disable", "engines are built one way", _OFF),
        _hidden("qserve_gemm_plugin", "disable", _NO_QUANTISATION, _OFF),
        _hidden("weight_only_groupwise_quant_matmul_plugin", "disable", _NO_QUANTISATION, _OFF),
        _hidden("weight_only_quant_matmul_plugin", "disable", _NO_QUANTISATION, _OFF),
        _hidden("smooth_quant_plugins", "enable", "it changes quantised models only", _EITHER),
        _hidden("smooth_quant_gemm_plugin", "disable", _NO_QUANTISATION, _OFF),
        _hidden("layernorm_quantization_plugin", "disable", _NO_QUANTISATION, _OFF),
        _hidden("rmsnorm_quantization_plugin", "disable", _NO_QUANTISATION, _OFF),
        _hidden("quantize_per_token_plugin", "disable", _NO_QUANTISATION, _OFF),
        _hidden("quantize_tensor_plugin", "disable", _NO_QUANTISATION, _OFF),
    ),
    "Gone from TensorRT-LLM before 1.2, for older scripts": (
        Flag("auto_parallel", "1", _ONE_GPU, accepts=("1",), section=Section.NONE),
        Flag("gpus_per_node", "8", _ONE_GPU, accepts=("8",), section=Section.NONE),
        Flag("cluster_key", None, _ONE_GPU, section=Section.NONE),
    ),
}
FLAGS = {flag.name: flag for flags in GROUPS.values() for flag in flags}
