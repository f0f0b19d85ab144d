"""Dense recompute of every family: what the engine's answers are held against.

Plain torch functions over a checkpoint's tensors by their Hugging Face names, written from
the models' description alone: no cache, no pages, nothing of looptrt is imported. Invariant:
a token's logits depend on the tokens up to it, their depths and their initial states.
In float32 it is the oracle; in bfloat16 it rounds where the references do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v) of the rows at work, each [rows, heads, head_dim] -> [rows, heads * head_dim]."""


@dataclass(frozen=True)
class Sizes:
    """What the oracle needs of a config.json."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    prelude: int
    core: int
    coda: int
    eps: float
    rope_base: float
    embedding_scale: float = 1.0
    state_mode: str = "random"
    rope_scaling: dict[str, Any] | None = None


class DenseOracle:
    """One checkpoint, evaluated densely.

    Args:
        config: config.json.
        tensors: the checkpoint's tensors.
        dtype: of weights and activations.

    Attributes:
        family: "ouro", "huginn", "olmo" or "llama", the last two the retrofitted ones.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.family = _family(config, tensors)
        sizes = {"ouro": _ouro_sizes, "huginn": _huginn_sizes}.get(self.family, _retrofit_sizes)
        self.sizes = sizes(config)
        self.dtype = dtype
        self.tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}

    @staticmethod
    def from_checkpoint(directory: Path | str, dtype: torch.dtype = torch.float32) -> DenseOracle:
        """Read config.json and every safetensors file of a Hugging Face directory."""
        directory = Path(directory)
        tensors: dict[str, Tensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            tensors.update(load_file(path))
        return DenseOracle(json.loads((directory / "config.json").read_text()), tensors, dtype)

    @torch.no_grad()
    def logits(
        self, token_ids: Sequence[int], depths: Sequence[int], noise: Tensor | None = None
    ) -> Tensor:
        """Logits of every position under the rule `latest`.

        At loop k the tokens deeper than k run; a query attends, for each token up to its
        own, to the K and V of that token's deepest loop <= k.

        Args:
            token_ids: [T] the whole sequence.
            depths: [T] loops of each token, at least 1.
            noise: [T, H] initial states as they enter the first loop, None for 0; for
                models that start from noise.

        Returns:
            [T, V] float32.
        """
        depth, num_tokens = torch.tensor(depths), len(token_ids)
        positions = torch.arange(num_tokens)
        injected = self._prelude(token_ids)
        state = self._initial_state(injected, noise)
        num_loops = int(depth.max())
        shape = (num_loops, num_tokens, self.sizes.kv_heads, self.sizes.head_dim)
        # history[layer] = (K, V), each [loop, token, kv head, channel]
        history = [
            (torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype))
            for _ in range(self.sizes.core)
        ]
        for loop in range(num_loops):
            rows = positions[depth > loop]
            deepest = torch.clamp(depth - 1, max=loop)

            def attend_in(
                layer: int, *, loop: int = loop, rows: Tensor = rows, deepest: Tensor = deepest
            ) -> Attend:
                def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                    keys, values = history[layer]
                    keys[loop, rows], values[loop, rows] = k, v
                    return _attention(q, keys[deepest, positions], values[deepest, positions], rows)

                return attend

            state[rows] = self._core(state[rows], injected[rows], rows, attend_in, loop)
        return self._coda(state, positions)

    @torch.no_grad()
    def ring_logits(
        self,
        token_ids: Sequence[int],
        depths: Sequence[int],
        chunks: Sequence[tuple[int, int]],
        ring: int,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Logits of every position under `shared` (ring 1) or `compress-sN` (ring N / core).

        Loop k writes and reads plane k mod ring, in place, so what an earlier token shows
        is whatever was written last. A token that stopped at a depth below `ring` has its
        last plane copied to the planes above before the loop it does not run.

        Args:
            token_ids: [T] the whole sequence.
            depths: [T] loops of each token, at least 1.
            chunks: (start, end) in the order they were run, covering 0..T; decoded tokens
                are chunks of one.
            ring: planes.
            noise: [T, H] initial states, None for 0.

        Returns:
            [T, V] float32.
        """
        depth, num_tokens = torch.tensor(depths), len(token_ids)
        assert [start for start, _ in chunks] + [num_tokens] == [0] + [end for _, end in chunks]
        injected = self._prelude(token_ids)
        state = self._initial_state(injected, noise)
        # planes[K or V, plane, layer, token, kv head, channel]
        planes = torch.zeros(
            (2, ring, self.sizes.core, num_tokens, self.sizes.kv_heads, self.sizes.head_dim),
            dtype=self.dtype,
        )
        for start, end in chunks:
            chunk = torch.arange(start, end)
            for loop in range(int(depth[chunk].max())):
                stopped = chunk[depth[chunk] == loop]
                if 0 < loop < ring:
                    planes[:, loop:, :, stopped] = planes[:, loop - 1 : loop, :, stopped]
                rows, plane = chunk[depth[chunk] > loop], loop % ring

                def attend_in(layer: int, *, rows: Tensor = rows, plane: int = plane) -> Attend:
                    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                        keys, values = planes[:, plane, layer]
                        keys[rows], values[rows] = k, v
                        return _attention(q, keys, values, rows)

                    return attend

                state[rows] = self._core(state[rows], injected[rows], rows, attend_in, loop)
            for token in chunk.tolist():
                stop = depths[token]
                if stop < ring:
                    planes[:, stop:, :, token] = planes[:, stop - 1 : stop, :, token]
        return self._coda(state, torch.arange(num_tokens))

    def greedy_generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        loops: int,
        prefill_loops: int | None = None,
        noise: Tensor | None = None,
        eos: int | None = None,
    ) -> list[int]:
        """Most likely tokens, the whole sequence recomputed for each; ends after `eos`.

        Args:
            prompt: token ids, with whatever the tokenizer puts in front.
            max_new_tokens: tokens at most.
            loops: S, of the last prompt token and the generated ones.
            prefill_loops: P, of the other prompt tokens; None means `loops`.
            noise: [at least prompt + max_new_tokens, H] initial states, None for 0.
            eos: id that ends the answer and is part of the result.
        """
        tokens = list(prompt)
        while len(tokens) < len(prompt) + max_new_tokens:
            depths = depth_plan(len(prompt), len(tokens), loops, prefill_loops)
            states = None if noise is None else noise[: len(tokens)]
            tokens.append(int(self.logits(tokens, depths, states)[-1].argmax()))
            if tokens[-1] == eos:
                break
        return tokens[len(prompt) :]

    def _prelude(self, token_ids: Sequence[int]) -> Tensor:
        """Embedding and prelude layers: [T, H]."""
        ids, positions = torch.tensor(token_ids), torch.arange(len(token_ids))
        if self.family == "ouro":
            return self.tensors["model.embed_tokens.weight"][ids]
        hidden = self.tensors["transformer.wte.weight"][ids] * self.sizes.embedding_scale
        for layer in range(self.sizes.prelude):
            name = f"transformer.prelude.{layer}"
            hidden = self._block(name, hidden, positions, _causal(positions))
        return hidden

    def _initial_state(self, injected: Tensor, noise: Tensor | None) -> Tensor:
        if self.family == "ouro" or self.sizes.state_mode != "random":
            return injected.clone()
        return torch.zeros_like(injected) if noise is None else noise.to(self.dtype).clone()

    def _core(
        self,
        state: Tensor,
        injected: Tensor,
        rows: Tensor,
        attend_in: Callable[[int], Attend],
        loop: int,
    ) -> Tensor:
        """One loop over the rows at work; `attend_in(layer)` attends in a core layer."""
        if self.family == "ouro":
            for layer in range(self.sizes.core):
                name = f"model.layers.{layer}"
                state = self._ouro_block(name, state, rows, attend_in(layer))
            return self._norm(state, "model.norm")
        if loop == 0 and self.sizes.state_mode == "skip-adapter":
            state = injected
        else:
            state = self._linear(torch.cat([state, injected], dim=-1), "transformer.adapter")
        for layer in range(self.sizes.core):
            name = f"transformer.core_block.{layer}"
            state = self._block(name, state, rows, attend_in(layer))
        return state

    def _coda(self, state: Tensor, positions: Tensor) -> Tensor:
        """Coda layers, norms and head on every token's last state: [T, V] float32."""
        if self.family == "ouro":
            head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
            return linear(state, head).float()
        if self.family == "huginn":
            state = self._norm(state, "transformer.ln_f")
        for layer in range(self.sizes.coda):
            name = f"transformer.coda.{layer}"
            state = self._block(name, state, positions, _causal(positions))
        head = self.tensors.get("lm_head.weight", self.tensors["transformer.wte.weight"])
        return linear(self._norm(state, "transformer.ln_f"), head).float()

    def _block(self, name: str, x: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        """One layer of a Raven variant."""
        block = {"huginn": self._huginn_block, "olmo": self._olmo_block, "llama": self._llama_block}
        return block[self.family](name, x, rows, attend)

    def _ouro_block(self, name: str, x: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        normed = self._norm(x, f"{name}.input_layernorm")
        q, k, v = (
            self._linear(normed, f"{name}.self_attn.{part}_proj").unflatten(
                -1, (-1, self.sizes.head_dim)
            )
            for part in "qkv"
        )
        attended = attend(self._turn(q, rows), self._turn(k, rows), v)
        attended = self._linear(attended, f"{name}.self_attn.o_proj")
        x = x + self._norm(attended, f"{name}.input_layernorm_2")
        normed = self._norm(x, f"{name}.post_attention_layernorm")
        gate = silu(self._linear(normed, f"{name}.mlp.gate_proj"))
        up = self._linear(normed, f"{name}.mlp.up_proj")
        down = self._linear(gate * up, f"{name}.mlp.down_proj")
        return x + self._norm(down, f"{name}.post_attention_layernorm_2")

    def _huginn_block(self, name: str, x: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        q, k, v = self._qkv(self._norm(x, f"{name}.norm_1"), name)
        bias = self.tensors[f"{name}.attn.qk_bias"]
        attended = self._attend(name, q + bias[0], k + bias[1], v, rows, attend)
        x = self._norm(x + attended, f"{name}.norm_2")
        return self._norm(x + self._mlp(self._norm(x, f"{name}.norm_3"), name), f"{name}.norm_4")

    def _olmo_block(self, name: str, x: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        q, k, v = self._qkv(x, name)
        q, k = (
            self._norm(part.flatten(1), f"{name}.attn.{letter}_norm").view_as(part)
            for part, letter in ((q, "q"), (k, "k"))
        )
        x = x + self._norm(self._attend(name, q, k, v, rows, attend), f"{name}.norm_1")
        return x + self._norm(self._mlp(x, name), f"{name}.norm_2")

    def _llama_block(self, name: str, x: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        q, k, v = self._qkv(self._norm(x, f"{name}.norm_1"), name)
        x = x + self._attend(name, q, k, v, rows, attend)
        return x + self._mlp(self._norm(x, f"{name}.norm_2"), name)

    def _qkv(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a Raven layer, each [rows, its heads, head_dim]."""
        heads, kv_heads = self.sizes.heads, self.sizes.kv_heads
        qkv = self._linear(x, f"{name}.attn.Wqkv").unflatten(-1, (-1, self.sizes.head_dim))
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=-2)
        return q, k, v

    def _attend(
        self, name: str, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, attend: Attend
    ) -> Tensor:
        attended = attend(self._turn(q, rows), self._turn(k, rows), v)
        return self._linear(attended, f"{name}.attn.proj")

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = self._linear(x, f"{name}.mlp.fc").chunk(2, -1)
        return self._linear(silu(gate) * up, f"{name}.mlp.proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.tensors[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.sizes.eps)
        return (wide * scale).to(x.dtype) * self.tensors[f"{name}.weight"]

    def _turn(self, x: Tensor, rows: Tensor) -> Tensor:
        """Rotary embedding of [rows, heads, head_dim]: in float32, or in the model dtype."""
        angles = self._angles(rows)
        cos, sin = angles.cos(), angles.sin()
        if self.family in ("ouro", "llama"):
            return _rotate_halves(x, cos.to(x.dtype), sin.to(x.dtype))
        rotate = _rotate_pairs if self.family == "huginn" else _rotate_halves
        return rotate(x.float(), cos, sin).to(x.dtype)

    def _angles(self, positions: Tensor) -> Tensor:
        """[rows, 1, head_dim / 2] rotation angles, computed as the references do."""
        exponent = torch.arange(0, self.sizes.head_dim, 2).float() / self.sizes.head_dim
        frequencies = 1.0 / self.sizes.rope_base**exponent
        if self.sizes.rope_scaling is not None:
            frequencies = _scaled(frequencies, self.sizes.rope_scaling)
        return torch.outer(positions.float(), frequencies)[:, None]


def depth_plan(
    num_prompt: int, num_tokens: int, loops: int, prefill_loops: int | None = None
) -> list[int]:
    """[num_tokens] depths: P for the prompt but its last token, S from there on."""
    prefill = loops if prefill_loops is None else prefill_loops
    return [prefill if position < num_prompt - 1 else loops for position in range(num_tokens)]


def _family(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    if config["architectures"] == ["OuroForCausalLM"]:
        return "ouro"
    if "transformer.core_block.0.norm_3.weight" in tensors:
        return "huginn"
    return "olmo" if "transformer.core_block.0.attn.q_norm.weight" in tensors else "llama"


def _scaled(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Rotations per position, stretched one by one as Llama 3 does, or all by one factor."""
    kind, factor = scaling["rope_type"], scaling["factor"]
    if kind == "linear":
        return frequencies / factor
    assert kind == "llama3"
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    stretched = []
    for frequency in frequencies.tolist():
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        stretched.append(frequency * (kept + (1 - kept) / factor))
    return torch.tensor(stretched)


def _ouro_sizes(config: dict[str, Any]) -> Sizes:
    heads = config["num_attention_heads"]
    return Sizes(
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        prelude=0,
        core=config["num_hidden_layers"],
        coda=0,
        eps=config["rms_norm_eps"],
        rope_base=config["rope_theta"],
    )


def _huginn_sizes(config: dict[str, Any]) -> Sizes:
    heads = config["n_heads"] if "n_heads" in config else config["num_attention_heads"]
    return Sizes(
        hidden=config["n_embd"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config["n_embd"] // heads,
        prelude=config["n_layers_in_prelude"],
        core=config["n_layers_in_recurrent_block"],
        coda=config["n_layers_in_coda"],
        eps=config["norm_eps"],
        rope_base=config.get("rope_base", 50000.0),
        embedding_scale=config["n_embd"] ** 0.5,
    )


def _retrofit_sizes(config: dict[str, Any]) -> Sizes:
    return Sizes(
        hidden=config["n_embd"],
        heads=config["n_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["n_embd"] // config["n_heads"],
        prelude=config["n_layers_in_prelude"],
        core=config["n_layers_in_recurrent_block"],
        coda=config["n_layers_in_coda"],
        eps=config["norm_eps"],
        rope_base=config["rope_theta"],
        embedding_scale=config["init_values"]["embed_scale"],
        state_mode=config["initial_state_mode"],
        rope_scaling=config.get("rope_scaling"),
    )


def _causal(rows: Tensor) -> Attend:
    """Attention of rows over themselves: a layer that runs once per token."""
    return lambda q, k, v: _attention(q, k, v, rows)


def _attention(q: Tensor, keys: Tensor, values: Tensor, rows: Tensor) -> Tensor:
    """Softmax attention of the queries at `rows` over every key up to their position.

    Args:
        q: [rows, heads, d]; keys and values: [T, kv_heads, d], token j at index j.
        rows: [rows] positions of the queries.

    Returns:
        [rows, heads * d].
    """
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
    hidden = torch.arange(len(keys))[None, :] > rows[:, None]
    masked = scores.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(masked.float(), dim=-1).to(q.dtype)
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels (i, i + d/2) of [rows, heads, d]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels (2i, 2i + 1) of [rows, heads, d]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
