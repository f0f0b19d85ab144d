"""A looped model as its user would otherwise run it: plain PyTorch, compiled, a static cache.

The comparator of benchmarks/serving.py. Layers are ordinary modules (separate projections,
norms in float32, scaled_dot_product_attention over a cache of fixed length); torch.compile
compiles a layer once, for all layers and loops, and one CUDA graph holds a whole decode step.
Prompts of equal length are prefilled together. Weights are random: only time is of interest.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import microseconds, steady

DTYPE = torch.bfloat16
_WARM_UP = 3


@dataclass(frozen=True)
class Shape:
    """Sizes of a looped model; prelude and coda run once, the core `loops` times."""

    hidden: int
    intermediate: int
    heads: int
    vocab: int
    prelude: int
    core: int
    coda: int
    loops: int
    has_adapter: bool
    interleaved: bool

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads


OURO_1_4B = Shape(2048, 5632, 16, 49152, 0, 24, 0, 4, False, False)
OURO_2_6B = Shape(2048, 5632, 16, 49152, 0, 48, 0, 4, False, False)
HUGINN = Shape(5280, 17920, 55, 65536, 2, 4, 2, 32, True, True)


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * scale).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Turn [batch, heads, tokens, head_dim] by tables of [tokens, head_dim / 2]."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


class Layer(nn.Module):
    """A sandwich layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, wide = shape.hidden, shape.intermediate
        self.norms = nn.ModuleList(Norm(hidden) for _ in range(4))
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        turns: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        """[batch, tokens, hidden]; writes the cache [batch, heads, length, head_dim] in place.

        Without a mask the tokens are a prompt and attend to each other alone.
        """
        batch, tokens, hidden = x.shape
        y = self.norms[0](x)
        q, k, v = (
            part(y).view(batch, tokens, self.shape.heads, -1).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q = rotate(q, *turns, interleaved=self.shape.interleaved)
        k = rotate(k, *turns, interleaved=self.shape.interleaved)
        keys.index_copy_(2, positions, k)
        values.index_copy_(2, positions, v)
        if mask is None:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        attended = self.o(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        x = x + self.norms[1](attended)
        y = self.norms[2](x)
        return x + self.norms[3](self.down(F.silu(self.gate(y)) * self.up(y)))


class PlainModel(nn.Module):
    """The whole model with a static cache for `batch` sequences of `length` tokens."""

    def __init__(self, shape: Shape, batch: int, length: int) -> None:
        super().__init__()
        self.shape, self.batch, self.length = shape, batch, length
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        count = shape.prelude + shape.core + shape.coda
        self.layers = nn.ModuleList(Layer(shape) for _ in range(count))
        self.norm = Norm(shape.hidden)
        self.adapter = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        slots = shape.prelude + shape.core * shape.loops + shape.coda
        size = (slots, 2, batch, shape.heads, length, shape.head_dim)
        self.register_buffer("cache", torch.zeros(size))
        angles = torch.outer(
            torch.arange(length).float(),
            1e4 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim),
        )
        self.register_buffer("cos", angles.cos().to(DTYPE))
        self.register_buffer("sin", angles.sin().to(DTYPE))
        self.compiled = torch.compile(Layer.forward, fullgraph=True, dynamic=False)

    def forward(self, token_ids: Tensor, positions: Tensor, *, is_prompt: bool) -> Tensor:
        """[batch, tokens] ids at [tokens] positions to the next ids, [batch, 1]."""
        shape, layers = self.shape, list(self.layers)
        turns = self.cos[positions], self.sin[positions]
        columns = torch.arange(self.length, device=positions.device)
        mask = None if is_prompt else columns <= positions[:, None]
        slot = 0

        def run(part: list[nn.Module], x: Tensor) -> Tensor:
            nonlocal slot
            for layer in part:
                keys, values = self.cache[slot]
                x = self.compiled(layer, x, keys, values, positions, turns, mask)
                slot += 1
            return x

        core = layers[shape.prelude : shape.prelude + shape.core]
        injected = run(layers[: shape.prelude], self.embedding(token_ids))
        x = torch.randn_like(injected) if shape.has_adapter else injected
        for _ in range(shape.loops):
            if shape.has_adapter:
                x = self.adapter(torch.cat((x, injected), dim=-1))
            x = self.norm(run(core, x))
        x = run(layers[shape.prelude + shape.core :], x)
        return self.head(self.norm(x[:, -1:])).argmax(-1)


def make(shape: Shape, batch: int, length: int, device: str = "cuda") -> PlainModel:
    """A model with weights that keep activations near 1."""
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPE)
        try:
            model = PlainModel(shape, batch, length)
        finally:
            torch.set_default_dtype(before)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
    return model.requires_grad_(requires_grad=False).eval()


@torch.no_grad()
def measure(shape: Shape, batch: int, prompt_tokens: int, output_tokens: int) -> dict[str, float]:
    """Milliseconds of a prefill and of a decode step, and what they make of a burst.

    A decode step is timed at the middle of the answer. `output_tokens_per_s` is the burst's,
    with the prompt, and no host between the steps.
    """
    model = make(shape, batch, prompt_tokens + output_tokens)
    prompt = torch.randint(0, shape.vocab, (batch, prompt_tokens), device="cuda")
    every = torch.arange(prompt_tokens, device="cuda")
    prefill_ms = microseconds(lambda: model(prompt, every, is_prompt=True)) / 1e3
    token = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    position = torch.full((1,), prompt_tokens + output_tokens // 2, device="cuda")
    for _ in range(_WARM_UP):
        model(token, position, is_prompt=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token.copy_(model(token, position, is_prompt=False))
    step_ms = statistics.median(steady(graph.replay)) / 1e3
    total_s = (prefill_ms + (output_tokens - 1) * step_ms) / 1e3
    return {
        "prefill_ms": prefill_ms,
        "ms_per_token": step_ms,
        "output_tokens_per_s": batch * output_tokens / total_s,
    }
