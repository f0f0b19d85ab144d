"""Tiny random checkpoints in the Hugging Face layout, for tests of everything above them.

`tiny_ouro(tmp_path / "c")`, `tiny_huginn`, `tiny_olmo` and `tiny_llama` write a whole directory
and return it. Tests of bad input take the parts instead: `ouro_config`, `ouro_tensors`,
`huginn_config`, …, `write_checkpoint`, and change one of them. The same
seed gives the same weights. Shapes and names follow models.md, not the product's code.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

VOCAB = 256
HIDDEN = 64
INTERMEDIATE = 96
HEADS = 4
BLOCK_SIZE = 128

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def ouro_config(**changes: object) -> Config:
    """config.json of a 3-layer, 4-loop Ouro; a change to `...` removes the key."""
    return _changed(
        {
            "architectures": ["OuroForCausalLM"],
            "model_type": "ouro",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": 3,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HIDDEN // HEADS,
            "hidden_act": "silu",
            "max_position_embeddings": BLOCK_SIZE,
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
            "torch_dtype": "float32",
        },
        changes,
    )


def huginn_config(**changes: object) -> Config:
    """config.json of a (2, 4, 2) × 4 Huginn; a change to `...` removes the key."""
    return _changed(
        {
            "architectures": ["RavenForCausalLM"],
            "model_type": "huginn_raven",
            "n_embd": HIDDEN,
            "n_heads": HEADS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "n_layers": 8,
            "n_layers_in_prelude": 2,
            "n_layers_in_recurrent_block": 4,
            "n_layers_in_coda": 2,
            "mean_recurrence": 4,
            "block_size": BLOCK_SIZE,
            "vocab_size": VOCAB,
            "padded_vocab_size": VOCAB,
            "intermediate_size": INTERMEDIATE,
            "bias": False,
            "qk_bias": True,
            "tie_embeddings": True,
            "norm_eps": 1e-6,
            "rope_base": 50000.0,
            "block_class_name": "SandwichBlock",
            "state_init": "like-init",
            "injection_type": "linear",
            "init_values": {"std": (2 / (5 * HIDDEN)) ** 0.5, "embed_scale": HIDDEN**0.5},
            "test_time_noise": 0,
            "torch_dtype": "float32",
        },
        changes,
    )


def olmo_config(**changes: object) -> Config:
    """config.json of a (2, 3, 1) × 4 recurrent OLMo-2, two query heads a KV head.

    Its keys carry the stale values that the converter leaves behind.
    """
    return _changed(_retrofit_config("olmo") | {"norm_eps": 1e-6, "rope_theta": 500000.0}, changes)


def llama_config(**changes: object) -> Config:
    """config.json of a (2, 3, 1) × 4 recurrent Llama, two query heads a KV head."""
    return _changed(
        _retrofit_config("llama")
        | {
            "norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        changes,
    )


def _retrofit_config(name: str) -> Config:
    return {
        "architectures": ["RavenForCausalLM"],
        "auto_map": {
            "AutoConfig": "raven_config_minimal.RavenConfig",
            "AutoModelForCausalLM": f"raven_modeling_minimal_{name}.RavenForCausalLM",
        },
        "model_type": "huginn_raven",
        "n_embd": HIDDEN,
        "n_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": HIDDEN // HEADS,
        "n_layers": 6,
        "n_layers_in_prelude": 2,
        "n_layers_in_recurrent_block": 3,
        "n_layers_in_coda": 1,
        "mean_recurrence": 4,
        "max_position_embeddings": BLOCK_SIZE,
        "block_size": 4096,
        "effective_expected_depth": 132,
        "padding_multiple": 4096,
        "vocab_size": VOCAB,
        "padded_vocab_size": VOCAB,
        "intermediate_size": INTERMEDIATE,
        "bias": False,
        "qk_bias": False,
        "tie_embeddings": False,
        "tie_word_embeddings": False,
        "rope_base": 7.0,  # not what rotates
        "block_class_name": "SandwichBlock",
        "state_init": "like-init",
        "initial_state_mode": "random",
        "injection_type": "linear",
        # Released models have a std of 0.0087, which hardly shows; embed_scale is theirs.
        "init_values": {"std": 0.5, "embed_scale": 1.0},
        "test_time_noise": 0,
        "torch_dtype": "float32",
    }


def ouro_tensors(config: Config, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    """Random weights for an Ouro config (`head_dim` and `num_key_value_heads` are read)."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_rows = (config.get("num_key_value_heads") or heads) * head_dim
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "model.early_exit_gate.weight": (1, hidden),
        "model.early_exit_gate.bias": (1,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_rows, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_rows, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{prefix}mlp.gate_proj.weight": (wide, hidden),
            f"{prefix}mlp.up_proj.weight": (wide, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, wide),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}input_layernorm_2.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm_2.weight": (hidden,),
        }
    return _random(shapes, seed, dtype)


def huginn_tensors(config: Config, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    """Random weights for a Huginn config; the head is tied, so there is no `lm_head.weight`."""
    hidden, wide, heads = config["n_embd"], config["intermediate_size"], config["n_heads"]
    head_dim = hidden // heads
    shapes = {
        "transformer.wte.weight": (config["vocab_size"], hidden),
        "transformer.adapter.weight": (hidden, 2 * hidden),
        "transformer.ln_f.weight": (hidden,),
    }
    groups = {
        "prelude": config["n_layers_in_prelude"],
        "core_block": config["n_layers_in_recurrent_block"],
        "coda": config["n_layers_in_coda"],
    }
    for group, layers in groups.items():
        for layer in range(layers):
            prefix = f"transformer.{group}.{layer}."
            shapes |= {f"{prefix}norm_{number}.weight": (hidden,) for number in (1, 2, 3, 4)}
            shapes |= {
                f"{prefix}attn.Wqkv.weight": (3 * hidden, hidden),
                f"{prefix}attn.qk_bias": (2, 1, heads, head_dim),
                f"{prefix}attn.proj.weight": (hidden, hidden),
                f"{prefix}mlp.fc.weight": (2 * wide, hidden),
                f"{prefix}mlp.proj.weight": (hidden, wide),
            }
    tensors = _random(shapes, seed, dtype)
    tensors["freqs_cis"] = _rope_table(config["block_size"], head_dim, config["rope_base"])
    return tensors


def olmo_tensors(config: Config, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    """Random weights for a recurrent OLMo-2 config, with a head of its own."""
    head_dim = config.get("head_dim") or config["n_embd"] // config["n_heads"]
    norms = {
        "attn.q_norm.weight": (config["n_heads"] * head_dim,),
        "attn.k_norm.weight": (config["num_key_value_heads"] * head_dim,),
    }
    return _random(_retrofit_shapes(config, norms), seed, dtype)


def llama_tensors(config: Config, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    """Random weights for a recurrent Llama config, with a head of its own."""
    return _random(_retrofit_shapes(config, {}), seed, dtype)


def _retrofit_shapes(
    config: Config, more: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Shapes of a retrofitted model, each layer with `more` tensors."""
    hidden, wide, heads = config["n_embd"], config["intermediate_size"], config["n_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    qkv_rows = (heads + 2 * config["num_key_value_heads"]) * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (config["vocab_size"], hidden),
        "transformer.adapter.weight": (hidden, 2 * hidden),
        "transformer.ln_f.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    layer_shapes = {
        "norm_1.weight": (hidden,),
        "norm_2.weight": (hidden,),
        "attn.Wqkv.weight": (qkv_rows, hidden),
        "attn.proj.weight": (hidden, heads * head_dim),
        "mlp.fc.weight": (2 * wide, hidden),
        "mlp.proj.weight": (hidden, wide),
        **more,
    }
    counts = {
        "prelude": config["n_layers_in_prelude"],
        "core_block": config["n_layers_in_recurrent_block"],
        "coda": config["n_layers_in_coda"],
    }
    for group, layers in counts.items():
        for layer in range(layers):
            prefix = f"transformer.{group}.{layer}."
            shapes |= {prefix + name: shape for name, shape in layer_shapes.items()}
    return shapes


def write_checkpoint(
    directory: Path, config: Config, tensors: Mapping[str, torch.Tensor], *, shards: int = 1
) -> Path:
    """Write config.json and the tensors, as one file or as shards with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    names = sorted(tensors)
    places: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard::shards]
        save_file({name: tensors[name] for name in mine}, directory / file_name)
        places |= dict.fromkeys(mine, file_name)
    index = {"metadata": {}, "weight_map": places}
    index_path = directory / "model.safetensors.index.json"
    index_path.write_text(json.dumps(index, indent=2), encoding="utf-8")
    return directory


def write_tokenizer(
    directory: Path, specials: Mapping[str, int], *, bos: str | None = None
) -> None:
    """Write a tokenizer.json of VOCAB words `t0`, `t1`, …; `specials` rename some of them.

    Args:
        directory: the checkpoint's directory.
        specials: {content: id} of the special tokens.
        bos: special token put in front of every text.
    """
    words = {f"t{token}": token for token in range(VOCAB)}
    for content, token in specials.items():
        del words[f"t{token}"]
        words[content] = token
    tokenizer = Tokenizer(WordLevel(words, unk_token="t255"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(specials))
    if bos is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, specials[bos])]
        )
    tokenizer.save(str(directory / "tokenizer.json"))


def tiny_ouro(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **changes: object,
) -> Path:
    """Write a tiny random Ouro; `changes` go to its config, which its weights follow."""
    config = ouro_config(torch_dtype=str(dtype).removeprefix("torch."), **changes)
    return write_checkpoint(
        directory, config, ouro_tensors(config, seed=seed, dtype=dtype), shards=shards
    )


def tiny_huginn(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **changes: object,
) -> Path:
    """Write a tiny random Huginn; `changes` go to its config, which its weights follow."""
    config = huginn_config(torch_dtype=str(dtype).removeprefix("torch."), **changes)
    return write_checkpoint(
        directory, config, huginn_tensors(config, seed=seed, dtype=dtype), shards=shards
    )


def tiny_olmo(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **changes: object,
) -> Path:
    """Write a tiny random recurrent OLMo-2; `changes` go to its config."""
    config = olmo_config(torch_dtype=str(dtype).removeprefix("torch."), **changes)
    return write_checkpoint(
        directory, config, olmo_tensors(config, seed=seed, dtype=dtype), shards=shards
    )


def tiny_llama(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **changes: object,
) -> Path:
    """Write a tiny random recurrent Llama; `changes` go to its config, which its weights follow."""
    config = llama_config(torch_dtype=str(dtype).removeprefix("torch."), **changes)
    return write_checkpoint(
        directory, config, llama_tensors(config, seed=seed, dtype=dtype), shards=shards
    )


def _changed(config: Config, changes: Mapping[str, object]) -> Config:
    return {name: value for name, value in (config | changes).items() if value is not ...}


def _random(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> Tensors:
    """Weights that keep activations near 1: norms about 1, matrices by their width."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        is_norm = "norm" in name or name.endswith("ln_f.weight")
        tensor = 1 + 0.1 * noise if is_norm else noise * shape[-1] ** -0.5
        tensors[name] = tensor.to(dtype)
    return tensors


def _rope_table(positions: int, head_dim: int, base: float) -> torch.Tensor:
    """`freqs_cis`: [1, positions, 1, head_dim / 2, 2 (cos, sin)], float32."""
    frequencies = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=-1).float()[None, :, None]


HF_CODE = Path(__file__).with_name("hf_code")


def with_remote_code(checkpoint: Path) -> Path:
    """Add a modelling file of our own to a tiny checkpoint, and the `auto_map` that names it."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    is_ouro = config["architectures"] == ["OuroForCausalLM"]
    stem, prefix = ("modeling_tiny_ouro", "Ouro") if is_ouro else ("modeling_tiny_huginn", "Raven")
    shutil.copyfile(HF_CODE / f"{stem}.py", checkpoint / f"{stem}.py")
    config["auto_map"] = {
        "AutoConfig": f"{stem}.{prefix}Config",
        "AutoModelForCausalLM": f"{stem}.{prefix}ForCausalLM",
    }
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return checkpoint


_TRTLLM_WHOLE = {
    "model.embed_tokens": "transformer.vocab_embedding",
    "transformer.wte": "transformer.vocab_embedding",
    "model.norm": "transformer.ln_f",
    "model.early_exit_gate": "transformer.exit_gate",
}
_TRTLLM_PARTS = {
    "self_attn.o_proj": "attention.dense",
    "mlp.gate_proj": "mlp.fc",
    "mlp.up_proj": "mlp.gate",
    "mlp.down_proj": "mlp.proj",
    "input_layernorm_2": "post_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_attention_layernorm_2": "post_feedforward_layernorm",
    "attn.Wqkv": "attention.qkv",
    "attn.q_norm": "attention.q_layernorm",
    "attn.k_norm": "attention.k_layernorm",
    "attn.proj": "attention.dense",
}
_TRTLLM_NORMS = {
    "huginn": (
        "input_layernorm",
        "post_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "olmo": ("post_layernorm", "post_feedforward_layernorm"),
    "llama": ("input_layernorm", "post_layernorm"),
}


def trtllm_tensors(config: Config, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """A checkpoint's tensors under TensorRT-LLM's names; those with no other name keep theirs."""
    parts = {"prelude": 0, "core_block": config.get("n_layers_in_prelude", 0), "model": 0}
    parts["coda"] = parts["core_block"] + config.get("n_layers_in_recurrent_block", 0)
    named: Tensors = {}
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"(?:transformer\.)?(\w+?)(?:\.layers)?\.(\d+)\.(.+)", name)
        if layer is None or layer[1] not in parts:
            stem, dot, ending = name.rpartition(".")
            named[_TRTLLM_WHOLE.get(stem, stem) + dot + ending] = tensor
            continue
        prefix = f"transformer.layers.{parts[layer[1]] + int(layer[2])}."
        named |= _trtllm_part(tensors, name.removesuffix(layer[3]), prefix, layer[3], tensor)
    return named


def _trtllm_part(
    tensors: Mapping[str, torch.Tensor], source: str, prefix: str, part: str, tensor: torch.Tensor
) -> Tensors:
    stem, _, ending = part.rpartition(".")
    if part == "attn.qk_bias":
        return {f"{prefix}attention.qk_bias": tensor.flatten()}
    if stem == "mlp.fc":
        gate, up = tensor.chunk(2)
        return {f"{prefix}mlp.fc.weight": gate.clone(), f"{prefix}mlp.gate.weight": up.clone()}
    if stem in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        rows = [tensors[f"{source}self_attn.{which}_proj.weight"] for which in "qkv"]
        return {f"{prefix}attention.qkv.weight": torch.cat(rows)}
    if stem.startswith("norm_"):
        has_qk_norm = f"{source}attn.q_norm.weight" in tensors
        has_four = f"{source}norm_3.weight" in tensors
        norms = _TRTLLM_NORMS["huginn" if has_four else "olmo" if has_qk_norm else "llama"]
        return {f"{prefix}{norms[int(stem[-1]) - 1]}.weight": tensor}
    return {f"{prefix}{_TRTLLM_PARTS.get(stem, stem)}.{ending}": tensor}


def write_trtllm_checkpoint(
    directory: Path, config: Config, tensors: Mapping[str, torch.Tensor], **changes: object
) -> Path:
    """Write a TensorRT-LLM checkpoint directory; `changes` go to the keys around `hf_config`."""
    directory.mkdir(parents=True, exist_ok=True)
    outer = {
        "architecture": config["architectures"][0],
        "dtype": config["torch_dtype"],
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "hf_config": config,
    }
    text = json.dumps(_changed(outer, changes), indent=2)
    (directory / "config.json").write_text(text, encoding="utf-8")
    named = {name: tensor.contiguous() for name, tensor in trtllm_tensors(config, tensors).items()}
    save_file(named, directory / "rank0.safetensors")
    return directory
