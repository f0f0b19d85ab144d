"""Tiny random checkpoints in the Hugging Face layout, for tests of everything above them.

`tiny_ouro(tmp_path / "c")` and `tiny_huginn(tmp_path / "c")` write a whole directory and
return it. Tests of bad input take the parts instead: `ouro_config`, `ouro_tensors`,
`huginn_config`, `huginn_tensors` and `write_checkpoint`, and change one of them. The same
seed gives the same weights. Shapes and names follow models.md, not the product's code.
"""

from __future__ import annotations

import json
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
