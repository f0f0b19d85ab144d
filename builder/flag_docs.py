"""docs/trtllm_build.md, written from the flag table: `python -m looptrt.builder.flag_docs`.

Owns the page's words; leaves every fact on it to the tables it is made of.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from looptrt.builder.flag_table import GROUPS, Flag, Form
from looptrt.models.trtllm_names import (
    GATE_UP,
    GATE_UP_NAMES,
    LAYER_NAMES,
    MODEL_NAMES,
    NORM_NAMES,
)

_HEAD = """# The flags of trtllm-build

Written by `python -m looptrt.builder.flag_docs`; a test keeps it so. Names, forms and defaults
are those of TensorRT-LLM 1.2. A flag **acts**, or is **accepted** at the values that are what
looptrt does anyway, or is **refused**: one line on stderr with the reason, exit code 2.

A file for `--build_config` has the keys of TensorRT-LLM's `BuildConfig`, with a nested
`plugin_config`; booleans may be `true`/`false` or `"enable"`/`"disable"`, null is the default
(in `plugin_config` it switches a plugin off). `plugin_config.dtype`, which TensorRT-LLM's build
fills in itself, has no say: `auto` is the engine's dtype. What a flag on the command line says
comes before the file; an unknown key is refused.

Where `tensorrt_llm` is installed, `trtllm-build` hands architectures that are not looped to
TensorRT-LLM's own build, with the same command line.
"""

_NAMES_HEAD = """
## TensorRT-LLM checkpoints

`looptrt convert` writes, and `--checkpoint_dir` takes, a directory with `config.json` and
`rank0.safetensors`. The config has TensorRT-LLM's keys (`architecture`, `dtype`, sizes,
`mapping`, `quantization`) and, under `hf_config`, the model's own config whole; where both say
something they must agree. Layers are numbered through prelude, core and coda. Names:

| Part | TensorRT-LLM name |
|---|---|
"""


def _code(words: Sequence[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def document() -> str:
    """docs/trtllm_build.md."""
    parts = [_HEAD]
    for title, flags in GROUPS.items():
        parts.append(f"\n## {title}\n\n| Flag | Default | Here | Notes |\n|---|---|---|---|\n")
        parts += [_row(flag) for flag in flags]
    layer = "transformer.layers.N."
    names = {stored.removesuffix(".weight"): [name] for stored, name in MODEL_NAMES.items()}
    for stored, name in LAYER_NAMES.items():
        names[f"layers.N.{stored.removesuffix('.weight')}"] = [layer + name]
    names[f"layers.N.{GATE_UP.removesuffix('.weight')}"] = [layer + name for name in GATE_UP_NAMES]
    for norms in dict.fromkeys(NORM_NAMES.values()):
        blocks = " and ".join(block for block, found in NORM_NAMES.items() if found == norms)
        names[f"norms of {blocks} layers, in order"] = [f"{layer}{norm}.weight" for norm in norms]
    rows = [f"| {part} | {_code(found)} |\n" for part, found in names.items()]
    return "".join([*parts, _NAMES_HEAD, *rows])


def _row(flag: Flag) -> str:
    names = [flag.name, *flag.aliases]
    title = _code([name if flag.form is Form.NONE else f"--{name}" for name in names])
    default = "none" if flag.default is None else f"`{flag.default}`"
    if flag.here is not None:
        default += f", here `{flag.here}`"
    note = flag.note
    if flag.form is Form.NONE:
        note += " (a key of --build_config only)"
    elif flag.key:
        note += f" (`{flag.key}` in --build_config)"
    return f"| {title} | {default} | {flag.verdict} | {note} |\n"


if __name__ == "__main__":
    sys.stdout.write(document())
