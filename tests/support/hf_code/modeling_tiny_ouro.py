"""A small Ouro for Transformers, written from its description: a reference that is not ours.

Copied into test checkpoints, where `auto_map` names it as remote code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OuroConfig(PretrainedConfig):
    model_type = "ouro"


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class Rotary(nn.Module):
    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.base, self.size = config.rope_theta, config.head_dim
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)

    def frequencies(self) -> Tensor:
        return 1.0 / self.base ** (torch.arange(0, self.size, 2).float() / self.size)

    def forward(self, x: Tensor, num_tokens: int) -> Tensor:
        angles = torch.outer(torch.arange(num_tokens).float(), self.inv_freq.float())
        angles = torch.cat((angles, angles), dim=-1)
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        hidden, self.size = config.hidden_size, config.head_dim
        query, key = (n * self.size for n in (config.num_attention_heads, config.kv_heads))
        self.q_proj = nn.Linear(hidden, query, bias=False)
        self.k_proj = nn.Linear(hidden, key, bias=False)
        self.v_proj = nn.Linear(hidden, key, bias=False)
        self.o_proj = nn.Linear(query, hidden, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotary(q, x.shape[1]), rotary(k, x.shape[1])
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        for name in ("input_layernorm", "post_attention_layernorm"):
            for ending in ("", "_2"):
                setattr(self, name + ending, RmsNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.input_layernorm_2(self.self_attn(self.input_layernorm(x), rotary))
        y = self.mlp(self.post_attention_layernorm(x))
        return x + self.post_attention_layernorm_2(y)


class Body(nn.Module):
    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.rotary_emb = Rotary(config)


class OuroForCausalLM(PreTrainedModel):
    config_class = OuroConfig
    leaves_tables_zeroed = False  # what a loader does that forgets tables not in the file

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        config.kv_heads = config.num_key_value_heads or config.num_attention_heads
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Rotary):
            table = module.frequencies()
            module.inv_freq.copy_(table * 0 if self.leaves_tables_zeroed else table)

    def forward(
        self, input_ids: Tensor, exit_at_step: int | None = None, use_cache: bool | None = None
    ) -> CausalLMOutput:
        x, states = self.model.embed_tokens(input_ids), []
        for _ in range(self.config.total_ut_steps):
            for layer in self.model.layers:
                x = layer(x, self.model.rotary_emb)
            x = self.model.norm(x)
            states.append(x)
        if exit_at_step is None:  # the gate would decide: not what a verification asks for
            raise ValueError("exit_at_step was not given")
        return CausalLMOutput(logits=self.lm_head(states[exit_at_step]))
