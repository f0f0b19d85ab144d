"""Builds an Ouro-1.4B-shaped checkpoint for TensorRT-RTX: wall time and memory of the build.

    python benchmarks/build_full_size.py [--out FILE] [--keep DIR]

Writes a checkpoint with random weights of the published shapes (2.9 GB) into a temporary folder,
runs `looptrt build --backend tensorrt_rtx` on it, and samples the resident memory of that process
and all its children. Needs about 12 GB of memory, 10 GB of disk, the plugin library and no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, INTERMEDIATE, HEADS, HEAD_DIM, VOCAB = 24, 2048, 5632, 16, 128, 49152
SAMPLE_EVERY_S = 0.1
TIMEOUT_S = 1800
TIME_TARGET_S = 300
MEMORY_TARGET = 3.5
CONFIG = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
LAYER_SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    "input_layernorm": (HIDDEN,),
    "input_layernorm_2": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    "post_attention_layernorm_2": (HIDDEN,),
}


def shards() -> Iterator[dict[str, tuple[int, ...]]]:
    yield {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.early_exit_gate.weight": (1, HIDDEN),
        "model.early_exit_gate.bias": (1,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        yield {f"{prefix}{name}.weight": shape for name, shape in LAYER_SHAPES.items()}


def write_checkpoint(directory: Path) -> int:
    """Write the checkpoint; returns the bytes of its weights."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    places, num_bytes = {}, 0
    generator = torch.Generator().manual_seed(0)
    for index, shapes in enumerate(shards()):
        tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for name, shape in shapes.items()
        }
        file_name = f"model-{index:05}.safetensors"
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file_name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    listing = {"metadata": {"total_size": num_bytes}, "weight_map": places}
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps(listing), encoding="utf-8")
    return num_bytes


def family_of(root: int) -> list[int]:
    """A process and all its descendants."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def run(command: list[str]) -> tuple[float, int, str]:
    """Seconds, peak resident bytes of all processes together, and the log."""
    begin_s, peak_bytes = time.monotonic(), 0
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                if time.monotonic() - begin_s > TIMEOUT_S:
                    raise SystemExit(f"not done within {TIMEOUT_S} s")
                peak_bytes = max(peak_bytes, sum(map(resident_bytes, family_of(process.pid))))
                time.sleep(SAMPLE_EVERY_S)
        finally:
            process.kill()
            process.wait()
        seconds = time.monotonic() - begin_s
        log.seek(0)
        text = log.read()
    if process.returncode:
        raise SystemExit(f"the build failed:\n{text}")
    return seconds, peak_bytes, text


def measure(directory: Path) -> dict[str, object]:
    load, begin_s = os.getloadavg()[0], time.monotonic()
    weights_bytes = write_checkpoint(directory / "checkpoint")
    print(f"checkpoint of {weights_bytes} bytes in {time.monotonic() - begin_s:.0f} s", flush=True)
    main = "from looptrt.cli import main; raise SystemExit(main())"
    flags = {
        "--checkpoint_dir": str(directory / "checkpoint"),
        "--output_dir": str(directory / "engine"),
        "--backend": "tensorrt_rtx",
        "--workers": "2",
        "--max_seq_len": "65536",
        "--max_batch_size": "64",
    }
    arguments = [word for flag in flags.items() for word in flag]
    seconds, peak_bytes, log = run([sys.executable, "-P", "-c", main, "build", *arguments])
    phases = {
        phase: {"seconds": float(spent), "peak_mib": int(peak), "engine_bytes": int(size)}
        for phase, size, spent, peak in re.findall(
            r"(\w+): engine of (\d+) bytes .* in ([\d.]+) s, peak memory (\d+) MiB", log
        )
    }
    return {
        "model": "Ouro-1.4B shapes, random bfloat16 weights",
        "weights_bytes": weights_bytes,
        "wall_s": round(seconds, 1),
        "wall_target_s": TIME_TARGET_S,
        "peak_resident_bytes": peak_bytes,
        "peak_over_weights": round(peak_bytes / weights_bytes, 2),
        "peak_over_weights_target": MEMORY_TARGET,
        "meets_targets": seconds < TIME_TARGET_S and peak_bytes < MEMORY_TARGET * weights_bytes,
        "phases": phases,
        "flags": {name: word for name, word in flags.items() if not name.endswith("_dir")},
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": round(load, 1),
        "versions": {
            "python": platform.python_version(),
            "tensorrt_rtx": version("tensorrt-rtx-cu13"),
            "torch": version("torch"),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "results" / "build_full_size.json"
    parser.add_argument("--out", type=Path, default=default, help="(default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="work in this new folder and leave it there")
    args = parser.parse_args()
    if args.keep is not None:
        args.keep.mkdir()
        figures = measure(args.keep)
    else:
        with tempfile.TemporaryDirectory(prefix="looptrt-build-") as directory:
            figures = measure(Path(directory))
    text = json.dumps(figures, indent=2) + "\n"
    args.out.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0 if figures["meets_targets"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
