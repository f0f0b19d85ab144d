"""The command line of `looptrt build` and `trtllm-build`.

Owns flag names, their defaults and the exit code; leaves the build to `builder.build`.
Invariant: bad input ends in one line on stderr and exit code 2, with nothing written.

Names and defaults are TensorRT-LLM's (1.2) where the flag exists there, but for
`--max_batch_size`, which there counts rows of a profile (2048) and here bounds requests
that hold KV at the same time: 128 is beyond what a GPU's memory holds of looped models.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from looptrt.builder.build import BuildConfig, build, plan_build
from looptrt.errors import BuildError, LooptrtError
from looptrt.loop_spec import NoiseMode

BAD_INPUT = 2

_LOG_LEVELS = {
    "internal_error": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}

_REASONS = {
    "--model_config": "the model is described by the checkpoint's config.json",
    "--model_cls_file": "add a family through the entry point group looptrt.families",
    "--model_cls_name": "add a family through the entry point group looptrt.families",
    "--build_config": "pass the flags themselves",
    "--input_timing_cache": "no TensorRT tactics are timed",
    "--output_timing_cache": "no TensorRT tactics are timed",
    "--profiling_verbosity": "no TensorRT plan is built",
    "--strip_plan": "no TensorRT plan is built",
    "--weight_sparsity": "weights stay as the checkpoint has them",
    "--weight_streaming": "weights are read from rank0.safetensors",
    "--fast_build": "no TensorRT tactics are timed",
    "--monitor_memory": "a build holds one tensor per worker",
    "--visualize_network": "open rank0.*.onnx in a viewer",
    "--enable_debug_output": "run a phase through looptrt.builder.verify",
    "--gather_context_logits": "prompt logits are never materialised",
    "--gather_generation_logits": "only sampled rows reach the head",
    "--gather_all_token_logits": "only sampled rows reach the head",
    "--opt_num_tokens": "shapes are dynamic, none is preferred",
    "--opt_batch_size": "shapes are dynamic, none is preferred",
    "--max_beam_width": "beam search is not supported",
    "--max_encoder_input_len": "looped models have no encoder",
    "--max_prompt_embedding_table_size": "prompt tuning is not supported",
    "--max_multimodal_len": "looped models take text only",
    "--kv_cache_free_gpu_mem_fraction": "it is a setting of the runtime",
    "--multiple_profiles": "shapes are dynamic, there are no profiles",
    "--lora_dir": "LoRA is not supported",
    "--lora_plugin": "LoRA is not supported",
    "--max_draft_len": "speculation is chosen by the runtime",
    "--speculative_decoding_mode": "speculation is chosen by the runtime",
    "--gpt_attention_plugin": "attention is always a plugin",
    "--gemm_plugin": "matrix products are never plugins",
    "--bert_attention_plugin": "attention is always packed_plane_attention",
    "--context_fmha": "attention is always packed_plane_attention",
    "--remove_input_padding": "inputs are always packed",
    "--paged_kv_cache": "KV is always paged",
    "--use_paged_context_fmha": "attention always reads paged KV",
    "--norm_quant_fusion": "quantisation is not supported",
    "--reduce_fusion": "an engine runs on one GPU",
    "--use_fused_mlp": "gate and up are always one projection",
    "--nccl_plugin": "an engine runs on one GPU",
    "--auto_parallel": "an engine runs on one GPU",
}


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are BuildErrors, so that they end in one line."""

    def error(self, message: str) -> NoReturn:
        raise BuildError(message)


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of `looptrt build` and `trtllm-build`.

    Its `parse_args` raises BuildError instead of leaving the process.
    """
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        description="Build an engine directory from a Hugging Face checkpoint of a looped "
        "language model.",
    )
    _add_places(parser)
    _add_limits(parser)
    _add_model_options(parser)
    return parser


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint_dir", type=Path, required=True, metavar="DIR", help="Hugging Face directory"
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("engine_outputs"),
        metavar="DIR",
        help="engine directory; one that is there is replaced when the build succeeds "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="threads that convert weights; each holds one tensor (default: %(default)s)",
    )
    parser.add_argument(
        "--log_level",
        choices=sorted(_LOG_LEVELS),
        default="info",
        help="least severe message shown (default: %(default)s)",
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="check everything, print the plan, write nothing"
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max_batch_size",
        type=int,
        default=BuildConfig.max_batch_size,
        metavar="N",
        help="requests that run at the same time (default: %(default)s)",
    )
    parser.add_argument(
        "--max_input_len",
        type=int,
        metavar="N",
        help="longest prompt (default: 1024, or max_seq_len if that is less)",
    )
    parser.add_argument(
        "--max_seq_len",
        "--max_decoder_seq_len",
        type=int,
        metavar="N",
        help="longest prompt and answer together (default: the model's positions)",
    )
    parser.add_argument(
        "--max_num_tokens",
        type=int,
        default=BuildConfig.max_num_tokens,
        metavar="N",
        help="tokens of one step, all requests together (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens_per_block",
        type=int,
        default=BuildConfig.tokens_per_block,
        metavar="N",
        help="tokens of a KV page (default: %(default)s)",
    )
    parser.add_argument(
        "--max_loops",
        type=int,
        metavar="N",
        help="most loops a request may ask for; may exceed the trained loops "
        "(default: the model's loops)",
    )


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        default="auto",
        help="pytorch, or auto = the fastest that works here (default: %(default)s)",
    )
    parser.add_argument(
        "--kv_cache_type",
        type=str.lower,
        default="paged",
        help="paged, the only kind (default: %(default)s)",
    )
    parser.add_argument(
        "--kv_planes",
        default=BuildConfig.kv_planes,
        metavar="{latest,shared,compress-sN}",
        help="planes of KV that the loops use: one each, one, or a ring of N layer slots "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--noise",
        type=NoiseMode,
        choices=list(NoiseMode),
        default=BuildConfig.noise,
        help="random initial state: a function of the position, or drawn in sequence "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        metavar="{float32,bfloat16}",
        help="weights and activations (default: what the checkpoint declares)",
    )
    parser.add_argument(
        "--logits_dtype",
        default=BuildConfig.logits_dtype,
        metavar="{float32,bfloat16}",
        help="output of the head (default: %(default)s)",
    )


def parse_config(argv: Sequence[str], prog: str) -> tuple[BuildConfig, argparse.Namespace]:
    """Read a command line.

    Raises:
        BuildError: an unknown, foreign or malformed flag; says why.
    """
    args, rest = make_parser(prog).parse_known_args(argv)
    if rest:
        flag = rest[0].partition("=")[0]
        raise BuildError(f"{flag}: {_REASONS.get(flag, 'unknown flag; see --help')}")
    _check_kv_cache_type(args.kv_cache_type)
    names = BuildConfig.__dataclass_fields__
    return BuildConfig(**{name: getattr(args, name) for name in names}), args


def _check_kv_cache_type(kind: str) -> None:
    reasons = {
        "continuous": "the KV of a looped model is allocated in plane units of pages",
        "disabled": "every loop reads the KV that the loops before it wrote",
    }
    if kind in reasons:
        raise BuildError(f"--kv_cache_type {kind}: {reasons[kind]}; use paged")
    if kind != "paged":
        raise BuildError(f"--kv_cache_type {kind}: unknown kind; use paged")


def main(argv: Sequence[str], prog: str = "trtllm-build") -> int:
    """Run a build from a command line; returns the process's exit code."""
    try:
        config, args = parse_config(argv, prog)
        _start_logging(args.log_level)
        if args.dry_run:
            sys.stdout.write(plan_build(config).describe())
        else:
            build(config)
    except (LooptrtError, OSError) as error:
        sys.stderr.write(f"{prog}: error: {' '.join(str(error).split())}\n")
        return BAD_INPUT
    return 0


def _start_logging(level: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    logging.getLogger("looptrt").setLevel(_LOG_LEVELS[level])
