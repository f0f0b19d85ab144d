"""A small Huginn for Transformers, written from its description: a reference that is not ours.

Copied into test checkpoints, where `auto_map` names it as remote code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class RavenConfig(PretrainedConfig):
    model_type = "huginn_raven"


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn pairs (2i, 2i + 1) of [batch, tokens, heads, channels] in float32."""
    pairs = x.float().unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = table[..., 0], table[..., 1]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: RavenConfig) -> None:
        super().__init__()
        hidden, self.heads = config.n_embd, config.n_heads
        self.Wqkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.qk_bias = nn.Parameter(torch.zeros(2, 1, self.heads, hidden // self.heads))
        self.proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.Wqkv(x).chunk(3, -1))
        q, k = rotate(q + self.qk_bias[0], table), rotate(k + self.qk_bias[1], table)
        rows = (part.transpose(1, 2) for part in (q, k, v))
        attended = scaled_dot_product_attention(*rows, is_causal=True)
        return self.proj(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: RavenConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc(x).chunk(2, -1)
        return self.proj(silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: RavenConfig) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(config), Mlp(config)
        for number in (1, 2, 3, 4):
            setattr(self, f"norm_{number}", RmsNorm(config.n_embd, config.norm_eps))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = self.norm_2(self.attn(self.norm_1(x), table) + x)
        return self.norm_4(self.mlp(self.norm_3(x)) + x)


class RavenForCausalLM(PreTrainedModel):
    config_class = RavenConfig

    def __init__(self, config: RavenConfig) -> None:
        super().__init__(config)

        def blocks(count: int) -> nn.ModuleList:
            return nn.ModuleList(Block(config) for _ in range(count))

        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "prelude": blocks(config.n_layers_in_prelude),
                "adapter": nn.Linear(2 * config.n_embd, config.n_embd, bias=False),
                "core_block": blocks(config.n_layers_in_recurrent_block),
                "coda": blocks(config.n_layers_in_coda),
                "ln_f": RmsNorm(config.n_embd, config.norm_eps),
            }
        )
        pairs = config.n_embd // config.n_heads // 2
        table = torch.zeros(1, config.block_size, 1, pairs, 2)
        self.register_buffer("freqs_cis", table, persistent=True)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass  # everything is in the file

    def forward(
        self,
        input_ids: Tensor,
        num_steps: int | None = None,
        init_scale: float = 1.0,
        use_cache: bool | None = None,
    ) -> CausalLMOutput:
        parts = self.transformer
        table = self.freqs_cis[:, : input_ids.shape[1]]
        injected = parts["wte"](input_ids) * self.config.n_embd**0.5
        for block in parts["prelude"]:
            injected = block(injected, table)
        state = torch.randn_like(injected) * init_scale
        for _ in range(num_steps or self.config.mean_recurrence):
            state = parts["adapter"](torch.cat((state, injected), dim=-1))
            for block in parts["core_block"]:
                state = block(state, table)
        state = parts["ln_f"](state)
        for block in parts["coda"]:
            state = block(state, table)
        return CausalLMOutput(logits=linear(parts["ln_f"](state), parts["wte"].weight).float())
