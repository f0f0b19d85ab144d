"""The oracle itself: against a plain loop, against itself, and against the trained models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from lookup_task import BOS, EOS, Sample, encode, load_samples
from tests.support.oracle import DenseOracle, depth_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
FAMILIES = ("ouro", "huginn")
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}

OURO = {
    "architectures": ["OuroForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
HUGINN = {
    "architectures": ["RavenForCausalLM"],
    "vocab_size": 256,
    "n_embd": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 4,
    "n_layers_in_coda": 2,
    "norm_eps": 1e-6,
}


def ouro_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    vocab, hidden, inner = (
        config[key] for key in ("vocab_size", "hidden_size", "intermediate_size")
    )
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            shapes[f"{name}.self_attn.{part}_proj.weight"] = (rows, hidden)
        for part, shape in (
            ("gate", (inner, hidden)),
            ("up", (inner, hidden)),
            ("down", (hidden, inner)),
        ):
            shapes[f"{name}.mlp.{part}_proj.weight"] = shape
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{name}.{norm}.weight"] = shapes[f"{name}.{norm}_2.weight"] = (hidden,)
    return shapes


def huginn_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    vocab, hidden, inner = (config[key] for key in ("vocab_size", "n_embd", "intermediate_size"))
    heads = config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (vocab, hidden),
        "transformer.adapter.weight": (hidden, 2 * hidden),
        "transformer.ln_f.weight": (hidden,),
    }
    for part, key in (
        ("prelude", "n_layers_in_prelude"),
        ("core_block", "n_layers_in_recurrent_block"),
        ("coda", "n_layers_in_coda"),
    ):
        for layer in range(config[key]):
            name = f"transformer.{part}.{layer}"
            shapes[f"{name}.attn.Wqkv.weight"] = (3 * hidden, hidden)
            shapes[f"{name}.attn.qk_bias"] = (2, 1, heads, hidden // heads)
            shapes[f"{name}.attn.proj.weight"] = (hidden, hidden)
            shapes[f"{name}.mlp.fc.weight"] = (2 * inner, hidden)
            shapes[f"{name}.mlp.proj.weight"] = (hidden, inner)
            shapes |= {f"{name}.norm_{i}.weight": (hidden,) for i in (1, 2, 3, 4)}
    return shapes


def random_tensors(family: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and random weights, with norms around 1 so that no factor hides."""
    config, shapes = (
        (OURO, ouro_shapes(OURO)) if family == "ouro" else (HUGINN, huginn_shapes(HUGINN))
    )
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * drawn if len(shape) == 1 else drawn * shape[-1] ** -0.5
    return config, tensors


def random_case(family: str) -> tuple[DenseOracle, list[int], Tensor]:
    """An oracle of random weights, 13 random tokens, and their initial states."""
    oracle = DenseOracle(*random_tensors(family))
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.randint(0, 256, (13,), generator=generator).tolist()
    return oracle, token_ids, torch.randn(13, oracle.sizes.hidden, generator=generator)


def rotate(x: Tensor, base: float, *, interleaved: bool) -> Tensor:
    """Rotary embedding by complex numbers: x is [heads, T, d]."""
    length, dim = x.shape[-2:]
    inverse = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
    turn = torch.polar(torch.ones(length, dim // 2), torch.outer(torch.arange(length), inverse))
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    return (turned if interleaved else turned.mT).flatten(-2)


def heads_of(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim)).transpose(0, 1)


def plain_ouro(
    config: dict[str, Any], w: dict[str, Tensor], token_ids: list[int], loops: int
) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], w[f"{name}.weight"], 1e-6)

    dim, base = config["head_dim"], config["rope_theta"]
    h = w["model.embed_tokens.weight"][token_ids]
    for _ in range(loops):
        for layer in range(config["num_hidden_layers"]):
            n = f"model.layers.{layer}"
            x = norm(h, f"{n}.input_layernorm")
            q, k, v = (heads_of(linear(x, w[f"{n}.self_attn.{p}_proj.weight"]), dim) for p in "qkv")
            q, k = (rotate(t, base, interleaved=False) for t in (q, k))
            a = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            a = linear(a.transpose(0, 1).flatten(1), w[f"{n}.self_attn.o_proj.weight"])
            h = h + norm(a, f"{n}.input_layernorm_2")
            x = norm(h, f"{n}.post_attention_layernorm")
            gate, up = (linear(x, w[f"{n}.mlp.{p}_proj.weight"]) for p in ("gate", "up"))
            m = linear(silu(gate) * up, w[f"{n}.mlp.down_proj.weight"])
            h = h + norm(m, f"{n}.post_attention_layernorm_2")
        h = norm(h, "model.norm")
    return linear(h, w["lm_head.weight"])


def plain_huginn(
    config: dict[str, Any], w: dict[str, Tensor], token_ids: list[int], loops: int, noise: Tensor
) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], w[f"{name}.weight"], 1e-6)

    dim = config["n_embd"] // config["num_attention_heads"]

    def block(x: Tensor, n: str) -> Tensor:
        qkv = linear(norm(x, f"{n}.norm_1"), w[f"{n}.attn.Wqkv.weight"])
        q, k, v = (heads_of(part, dim) for part in qkv.chunk(3, dim=-1))
        bias = w[f"{n}.attn.qk_bias"].transpose(1, 2)
        q, k = (rotate(t, 50000.0, interleaved=True) for t in (q + bias[0], k + bias[1]))
        a = scaled_dot_product_attention(q, k, v, is_causal=True)
        a = linear(a.transpose(0, 1).flatten(1), w[f"{n}.attn.proj.weight"])
        x = norm(a + x, f"{n}.norm_2")
        gate, up = linear(norm(x, f"{n}.norm_3"), w[f"{n}.mlp.fc.weight"]).chunk(2, dim=-1)
        return norm(linear(silu(gate) * up, w[f"{n}.mlp.proj.weight"]) + x, f"{n}.norm_4")

    e = w["transformer.wte.weight"][token_ids] * 64**0.5
    for i in range(config["n_layers_in_prelude"]):
        e = block(e, f"transformer.prelude.{i}")
    s = noise
    for _ in range(loops):
        s = linear(torch.cat([s, e], dim=-1), w["transformer.adapter.weight"])
        for i in range(config["n_layers_in_recurrent_block"]):
            s = block(s, f"transformer.core_block.{i}")
    s = norm(s, "transformer.ln_f")
    for i in range(config["n_layers_in_coda"]):
        s = block(s, f"transformer.coda.{i}")
    return linear(norm(s, "transformer.ln_f"), w["transformer.wte.weight"])


@pytest.mark.parametrize("loops", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_depths_give_what_a_plain_loop_gives(family: str, loops: int) -> None:
    oracle, token_ids, noise = random_case(family)
    config, tensors = random_tensors(family)
    if family == "ouro":
        want = plain_ouro(config, tensors, token_ids, loops)
    else:
        want = plain_huginn(config, tensors, token_ids, loops, noise)
    got = oracle.logits(token_ids, [loops] * 13, noise)
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_shallow_tokens_do_not_depend_on_how_deep_later_ones_run(family: str) -> None:
    oracle, token_ids, noise = random_case(family)
    uniform = oracle.logits(token_ids, [2] * 13, noise)
    deeper = oracle.logits(token_ids, [2] * 8 + [5] * 5, noise)
    torch.testing.assert_close(deeper[:8], uniform[:8], **TOLERANCE)
    assert (deeper[8:] - uniform[8:]).abs().max() > 0.1


@pytest.mark.parametrize("chunks", [[(0, 13)], [(0, 5), (5, 6), (6, 13)]])
@pytest.mark.parametrize("family", FAMILIES)
def test_ring_as_wide_as_the_deepest_token_is_the_rule_latest(
    family: str, chunks: list[tuple[int, int]]
) -> None:
    oracle, token_ids, noise = random_case(family)
    depths = [1, 2, 2, 3, 5, 1, 4, 2, 2, 5, 3, 1, 5]
    want = oracle.logits(token_ids, depths, noise)
    got = oracle.ring_logits(token_ids, depths, chunks, 5, noise)
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_chunk_of_any_ring_is_the_rule_latest_at_equal_depths(family: str) -> None:
    oracle, token_ids, noise = random_case(family)
    want = oracle.logits(token_ids, [4] * 13, noise)
    for ring in (1, 2, 3):
        got = oracle.ring_logits(token_ids, [4] * 13, [(0, 13)], ring, noise)
        torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_narrow_ring_depends_on_the_chunk_schedule(family: str) -> None:
    oracle, token_ids, noise = random_case(family)
    whole = oracle.ring_logits(token_ids, [4] * 13, [(0, 13)], 1, noise)
    cut = oracle.ring_logits(token_ids, [4] * 13, [(0, 6), (6, 13)], 1, noise)
    torch.testing.assert_close(cut[:6], whole[:6], **TOLERANCE)
    assert (cut[6:] - whole[6:]).abs().max() > 0.01


def test_huginn_rotation_angles_are_those_of_the_checkpoints_table() -> None:
    table = load_file(EXAMPLES / "tiny-huginn" / "model.safetensors")["freqs_cis"]
    oracle = DenseOracle.from_checkpoint(EXAMPLES / "tiny-huginn")
    angles = oracle._angles(torch.arange(512))[:, 0]
    torch.testing.assert_close(angles.cos(), table[0, :, 0, :, 0], atol=1e-6, rtol=0)
    torch.testing.assert_close(angles.sin(), table[0, :, 0, :, 1], atol=1e-6, rtol=0)


def answers_exactly(oracle: DenseOracle, sample: Sample, loops: int, prefill: int) -> bool:
    """Teacher-forced: greedy decoding is right if and only if every argmax is."""
    prompt, answer = [BOS, *encode(sample.prompt)], encode(sample.answer)
    tokens = prompt + answer
    depths = depth_plan(len(prompt), len(tokens), loops, prefill)
    argmax = oracle.logits(tokens, depths)[len(prompt) - 1 :].argmax(-1)
    return argmax.tolist() == [*answer, EOS]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return load_samples(EXAMPLES / "data" / "heldout_eval.jsonl")


@pytest.mark.parametrize(("loops", "exact"), [(1, 0.404), (2, 0.964), (3, 0.998), (4, 1.0)])
def test_tiny_ouro_scores_on_the_evaluation_file_as_published(
    samples: list[Sample], loops: int, exact: float
) -> None:
    oracle = DenseOracle.from_checkpoint(EXAMPLES / "tiny-ouro")
    right = sum(answers_exactly(oracle, sample, loops, loops) for sample in samples)
    assert right == round(exact * 500)


@pytest.mark.parametrize("loops", [1, 2, 3, 4])
def test_tiny_huginn_answers_samples_of_at_most_as_many_hops_as_loops(
    samples: list[Sample], loops: int
) -> None:
    oracle = DenseOracle.from_checkpoint(EXAMPLES / "tiny-huginn")
    for sample in samples[:100]:
        assert answers_exactly(oracle, sample, loops, loops) == (sample.hops <= loops)


def test_greedy_generation_ends_with_eos_and_equals_the_teacher_forced_answer(
    samples: list[Sample],
) -> None:
    for name, loops in (("tiny-ouro", 4), ("tiny-huginn", 4)):
        oracle = DenseOracle.from_checkpoint(EXAMPLES / name)
        for sample in samples[:3]:
            prompt = [BOS, *encode(sample.prompt)]
            got = oracle.greedy_generate(prompt, 8, loops=loops, prefill_loops=2, eos=EOS)
            assert got == [*encode(sample.answer), EOS]


def test_a_huginn_stopped_too_early_shows_how_far_it_got() -> None:
    oracle = DenseOracle.from_checkpoint(EXAMPLES / "tiny-huginn")
    prompt = [BOS, *encode("n=5;a=0;y=s;m=7;f=2;s=m;p=y;t=y;?mft>")]
    for loops, answer in ((1, "m7f2ty"), (2, "m7f2ts"), (3, "m7f2tm"), (4, "m7f2t7")):
        assert oracle.greedy_generate(prompt, 6, loops=loops) == encode(answer)
