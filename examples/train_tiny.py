"""Train a tiny Ouro or Huginn on the look-up task, by the recipe of its model card.

`python examples/train_tiny.py --family huginn --minutes 9 --out /tmp/my-huginn` writes a
Hugging Face directory that `looptrt build` takes. The model is dense plain torch of its own;
nothing of looptrt is used. The recipe is timed (on the CPU by the time computed): a slower
machine takes fewer steps and ends with a lower exact match.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.progress import Progress
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    linear,
    rms_norm,
    scaled_dot_product_attention,
    silu,
)

from lookup_task import BOS, EOS, NUM_ANSWER_TOKENS, Sample, draw, encode, held_out, is_held_out

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
HERE = Path(__file__).parent
DIGIT_PLACES = torch.tensor([1, 3, 5])  # of the answer's seven tokens
ANSWER_WEIGHTS = torch.tensor([0.15, 1.0, 0.15, 1.0, 0.15, 1.0, 0.15])
EPS = 1e-6


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum: hops, facts, and the loops its batches run."""

    max_hops: int
    facts: tuple[int, int]
    loops: tuple[int, int]


@dataclass
class Batch:
    """Samples as tensors.

    Attributes:
        token_ids: [B, T] `<bos>`, prompt, answer, padding.
        last_prompt: [B] position of `>`, where the answer's first token is predicted.
        targets: [B, loops, 7] what each loop should predict: at a digit's place the token
            reached after that many hops.
        final: [B, 7] the answer and `<eos>`.
        weight: [B] 0 for held-out prompts, else 1.
    """

    token_ids: Tensor
    last_prompt: Tensor
    targets: Tensor
    final: Tensor
    weight: Tensor

    @staticmethod
    def of(samples: list[Sample], num_loops: int) -> Batch:
        """Encode and pad samples."""
        rows = [[BOS, *encode(sample.prompt + sample.answer)] for sample in samples]
        width = max(map(len, rows))
        return Batch(
            token_ids=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
            last_prompt=torch.tensor([len(row) - NUM_ANSWER_TOKENS for row in rows]),
            targets=torch.tensor([_targets(sample, num_loops) for sample in samples]),
            final=torch.tensor([[*encode(sample.answer), EOS] for sample in samples]),
            weight=torch.tensor([float(not is_held_out(sample.prompt)) for sample in samples]),
        )

    def to(self, device: str) -> Batch:
        """The same batch on a device."""
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def depths(self, prefill: Tensor, loops: int) -> Tensor:
        """[B, T]: P for prompt positions but the last, S from there on."""
        places = torch.arange(self.token_ids.shape[1], device=prefill.device)
        return torch.where(places < self.last_prompt[:, None], prefill[:, None], loops)

    def at_answer(self, x: Tensor) -> Tensor:
        """[B, 7, ...] of [B, T, ...]: the positions that predict the answer."""
        places = torch.arange(NUM_ANSWER_TOKENS, device=x.device)
        rows = torch.arange(len(x), device=x.device)[:, None]
        return x[rows, self.last_prompt[:, None] + places]


def _targets(sample: Sample, num_loops: int) -> list[list[int]]:
    """[num_loops][7]: the answer with each digit replaced by the token k hops away."""
    facts_text, query = sample.prompt.removesuffix(">").split("?")
    facts = dict(fact.split("=") for fact in facts_text.removesuffix(";").split(";"))
    reached, rows = list(query), []
    for _ in range(num_loops):
        reached = [facts.get(letter, letter) for letter in reached]
        pairs = zip(query, reached, strict=True)
        rows.append([*encode("".join(a + b for a, b in pairs)), EOS])
    return rows


class TinyModel:
    """A dense looped transformer over weights under their Hugging Face names."""

    def __init__(self, weights: dict[str, Tensor], *, head_dim: int, rope_base: float) -> None:
        self.weights, self.head_dim, self.rope_base = weights, head_dim, rope_base

    def loops(self, batch: Batch, depths: Tensor, initial: Tensor) -> Iterator[Tensor]:
        """Yield the state [B, T, H] after each loop; stopped positions keep theirs."""
        injected = self.prelude(batch.token_ids)
        state = self.initial_state(injected, initial)
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        for loop in range(int(depths.max())):
            active = depths > loop

            def attend_in(name: str, *, loop: int = loop, active: Tensor = active) -> Attend:
                def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                    if loop:
                        mask = active[:, None, :, None]
                        k, v = (torch.where(mask, new, old)
                                for new, old in zip((k, v), seen[name], strict=True))  # fmt: skip
                    seen[name] = k, v
                    return scaled_dot_product_attention(q, k, v, is_causal=True)

                return attend

            state = torch.where(active[..., None], self.core(state, injected, attend_in), state)
            yield state

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], EPS)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"])

    def heads(self, x: Tensor) -> Tensor:
        """[B, heads, T, d] of [B, T, heads * d]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def angles(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        exponent = torch.arange(0, self.head_dim, 2, device=device) / self.head_dim
        angles = torch.outer(torch.arange(length, device=device), 1.0 / self.rope_base**exponent)
        return angles.cos(), angles.sin()

    def prelude(self, token_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def initial_state(self, injected: Tensor, initial: Tensor) -> Tensor:
        raise NotImplementedError

    def core(self, state: Tensor, injected: Tensor, attend_in: Callable[[str], Attend]) -> Tensor:
        raise NotImplementedError

    def logits(self, batch: Batch, state: Tensor) -> Tensor:
        """[B, 7, V] predictions of the answer."""
        raise NotImplementedError


class TinyOuro(TinyModel):
    """Ouro: the norm closes each loop, untied head."""

    num_layers = 2

    @staticmethod
    def create(config: dict[str, Any]) -> TinyOuro:
        hidden, inner, vocab = 128, 352, 48
        weights = {
            "model.embed_tokens.weight": torch.randn(vocab, hidden),
            "model.norm.weight": torch.ones(hidden),
            "model.early_exit_gate.weight": torch.zeros(1, hidden),
            "model.early_exit_gate.bias": torch.zeros(1),
            "lm_head.weight": torch.randn(vocab, hidden) * 0.05,
        }
        shapes = {f"self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"}
        shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
        shapes |= {"mlp.down_proj": (hidden, inner)}
        for layer in range(TinyOuro.num_layers):
            name = f"model.layers.{layer}"
            for part, shape in shapes.items():
                std = math.sqrt(2 / sum(shape))
                weights[f"{name}.{part}.weight"] = torch.randn(shape) * std
            for norm in ("input_layernorm", "post_attention_layernorm"):
                for suffix in ("", "_2"):
                    weights[f"{name}.{norm}{suffix}.weight"] = torch.ones(hidden)
        return TinyOuro(weights, head_dim=32, rope_base=config["rope_theta"])

    def prelude(self, token_ids: Tensor) -> Tensor:
        return self.weights["model.embed_tokens.weight"][token_ids]

    def initial_state(self, injected: Tensor, initial: Tensor) -> Tensor:
        return injected

    def core(self, state: Tensor, injected: Tensor, attend_in: Callable[[str], Attend]) -> Tensor:
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}"
            x = self.norm(state, f"{name}.input_layernorm")
            q, k, v = (self.heads(self.linear(x, f"{name}.self_attn.{p}_proj")) for p in "qkv")
            attended = attend_in(name)(self.rotate(q), self.rotate(k), v).transpose(1, 2)
            attended = self.linear(attended.flatten(2), f"{name}.self_attn.o_proj")
            state = state + self.norm(attended, f"{name}.input_layernorm_2")
            x = self.norm(state, f"{name}.post_attention_layernorm")
            gated = silu(self.linear(x, f"{name}.mlp.gate_proj"))
            gated = gated * self.linear(x, f"{name}.mlp.up_proj")
            down = self.linear(gated, f"{name}.mlp.down_proj")
            state = state + self.norm(down, f"{name}.post_attention_layernorm_2")
        return self.norm(state, "model.norm")

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.angles(x.shape[2], x.device)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def logits(self, batch: Batch, state: Tensor) -> Tensor:
        return self.linear(batch.at_answer(state), "lm_head")

    def gate(self, state: Tensor) -> Tensor:
        """[...] exit gate before the sigmoid."""
        weights = self.weights
        gate = linear(
            state, weights["model.early_exit_gate.weight"], weights["model.early_exit_gate.bias"]
        )
        return gate.squeeze(-1)


class TinyHuginn(TinyModel):
    """Huginn: prelude, adapter, norm on the residual sum, coda, tied head."""

    hidden = 96

    @staticmethod
    def create(config: dict[str, Any]) -> TinyHuginn:
        hidden, inner, heads, head_dim = TinyHuginn.hidden, 192, 3, 32
        std = math.sqrt(2 / (5 * hidden))
        weights = {
            "transformer.wte.weight": torch.randn(48, hidden) * std,
            "transformer.adapter.weight": torch.randn(hidden, 2 * hidden) * std,
            "transformer.ln_f.weight": torch.ones(hidden),
        }
        for part, layers in (("prelude", 1), ("core_block", 2), ("coda", 1)):
            for layer in range(layers):
                name = f"transformer.{part}.{layer}"
                for matrix, shape in (
                    ("attn.Wqkv", (3 * hidden, hidden)),
                    ("attn.proj", (hidden, hidden)),
                    ("mlp.fc", (2 * inner, hidden)),
                    ("mlp.proj", (hidden, inner)),
                ):
                    weights[f"{name}.{matrix}.weight"] = torch.randn(shape) * std
                weights |= {f"{name}.norm_{i}.weight": torch.ones(hidden) for i in (1, 2, 3, 4)}
                weights[f"{name}.attn.qk_bias"] = torch.zeros(2, 1, heads, head_dim)
        _look_back(weights["transformer.prelude.0.attn.qk_bias"], config["rope_base"])
        return TinyHuginn(weights, head_dim=head_dim, rope_base=config["rope_base"])

    def prelude(self, token_ids: Tensor) -> Tensor:
        x = self.weights["transformer.wte.weight"][token_ids] * math.sqrt(self.hidden)
        return self.block(x, "transformer.prelude.0", _attend_causally)

    def initial_state(self, injected: Tensor, initial: Tensor) -> Tensor:
        return initial

    def core(self, state: Tensor, injected: Tensor, attend_in: Callable[[str], Attend]) -> Tensor:
        state = self.linear(torch.cat([state, injected], dim=-1), "transformer.adapter")
        for layer in (0, 1):
            name = f"transformer.core_block.{layer}"
            state = self.block(state, name, attend_in(name))
        return state

    def block(self, x: Tensor, name: str, attend: Attend) -> Tensor:
        qkv = self.linear(self.norm(x, f"{name}.norm_1"), f"{name}.attn.Wqkv")
        q, k, v = (self.heads(part) for part in qkv.chunk(3, dim=-1))
        bias = self.weights[f"{name}.attn.qk_bias"].transpose(1, 2)
        attended = attend(self.rotate(q + bias[0]), self.rotate(k + bias[1]), v)
        attended = self.linear(attended.transpose(1, 2).flatten(2), f"{name}.attn.proj")
        x = self.norm(attended + x, f"{name}.norm_2")
        gate, up = self.linear(self.norm(x, f"{name}.norm_3"), f"{name}.mlp.fc").chunk(2, dim=-1)
        return self.norm(self.linear(silu(gate) * up, f"{name}.mlp.proj") + x, f"{name}.norm_4")

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.angles(x.shape[2], x.device)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)

    def logits(self, batch: Batch, state: Tensor) -> Tensor:
        state = self.norm(state, "transformer.ln_f")
        state = self.block(state, "transformer.coda.0", _attend_causally)
        state = self.norm(batch.at_answer(state), "transformer.ln_f")
        return linear(state, self.weights["transformer.wte.weight"])

    def freqs_cis(self, length: int) -> Tensor:
        """[1, length, 1, d / 2, 2] the rotation table that a Huginn file carries."""
        return torch.stack(self.angles(length, torch.device("cpu")), dim=-1)[None, :, None]


def _attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def _look_back(qk_bias: Tensor, rope_base: float, amplitude: float = 3.5) -> None:
    """Start the heads as soft "two, one, three back" heads on the four fastest rope pairs."""
    for head, distance in enumerate((2, 1, 3)):
        for pair in range(4):
            angle = -distance * rope_base ** (-2 * pair / qk_bias.shape[-1])
            channels = slice(2 * pair, 2 * pair + 2)
            qk_bias[0, 0, head, channels] = amplitude * torch.tensor(
                [math.cos(angle), math.sin(angle)]
            )
            qk_bias[1, 0, head, channels] = amplitude * torch.tensor([1.0, 0.0])


class Clock:
    """How much of the training time is spent; every schedule reads it.

    On the CPU it counts the time that this process computed, so that a busy machine takes
    longer and trains no worse.
    """

    def __init__(self, seconds: float, device: str, threads: int) -> None:
        on_cpu = device == "cpu"
        self.now = time.process_time if on_cpu else time.monotonic
        self.seconds = seconds * (threads if on_cpu else 1)
        self.started = self.now()

    def share(self) -> float:
        """Between 0 and 1."""
        return min(1.0, (self.now() - self.started) / self.seconds)


class Trainer:
    """What both recipes share: optimizer, curriculum, exact match, step."""

    def __init__(
        self, model: TinyModel, stages: list[Stage], random: Random, groups: list[dict[str, Any]]
    ) -> None:
        self.model, self.stages, self.random = model, stages, random
        self.device = str(next(iter(model.weights.values())).device)
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.stage, self.step, self.exact = 0, 0, 0.0

    def samples(self, count: int, stage: Stage) -> list[Sample]:
        return [draw(self.random, stage.max_hops, stage.facts, 0.4) for _ in range(count)]

    def update(self, loss: Tensor, rate: float) -> None:
        """One optimizer step at `rate` times each group's learning rate."""
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr * rate
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.weights.values(), 1.0)
        self.optimizer.step()
        self.step += 1

    def observe(self, exact: float, threshold: float) -> bool:
        """Track the exact match; whether the next stage begins."""
        self.exact = 0.9 * self.exact + 0.1 * exact
        if self.exact > threshold and self.stage + 1 < len(self.stages):
            self.stage, self.exact = self.stage + 1, 0.0
            return True
        return False


def answer_loss(batch: Batch, logits: Tensor, targets: Tensor) -> Tensor:
    """Weighted cross-entropy at the answer's positions; held-out prompts count nothing."""
    weights = batch.weight[:, None] * ANSWER_WEIGHTS.to(logits.device)
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1e-9)


def is_exact(batch: Batch, logits: Tensor) -> Tensor:
    """[B] whether every answer token and `<eos>` is the most likely one."""
    return (logits.argmax(-1) == batch.final).all(-1)


def parameters(model: TinyModel, *, decay: float, lr: float) -> list[dict[str, Any]]:
    """Optimizer groups: weight decay on matrices only."""
    for tensor in model.weights.values():
        tensor.requires_grad_()
    matrices = [tensor for tensor in model.weights.values() if tensor.dim() == 2]
    others = [tensor for tensor in model.weights.values() if tensor.dim() != 2]
    return [
        {"params": matrices, "lr": lr, "weight_decay": decay},
        {"params": others, "lr": lr, "weight_decay": 0.0},
    ]


def train_ouro(model: TinyOuro, random: Random, clock: Clock, tick: Callable[..., None]) -> None:
    """The recipe of tiny-ouro; ends with the averaged weights in place."""
    stages = [
        Stage(hops, facts, (4, 4))
        for hops, facts in ((1, (3, 5)), (2, (4, 6)), (3, (5, 7)), (4, (6, 10)))
    ]
    trainer = Trainer(model, stages, random, parameters(model, decay=0.02, lr=3e-3))
    average = {name: tensor.detach().clone() for name, tensor in model.weights.items()}
    initial = torch.zeros(0)
    while (share := clock.share()) < 1:
        if share > 0.6:
            trainer.stage = len(stages) - 1
        easier = random.randrange(trainer.stage) if trainer.stage else 0
        samples = trainer.samples(192, stages[trainer.stage]) + trainer.samples(64, stages[easier])
        batch = Batch.of(samples, 4).to(trainer.device)
        prefill = torch.tensor(random.choices((1, 2, 3, 4), (1, 2, 1, 4), k=len(samples)))
        depths = batch.depths(prefill.to(trainer.device), 4)
        loss = torch.zeros((), device=trainer.device)
        for loop, state in enumerate(model.loops(batch, depths, initial)):
            logits = model.logits(batch, state)
            loss = loss + (0.1, 0.15, 0.25, 0.5)[loop] * answer_loss(batch, logits, batch.final)
            loss = loss + gate_loss(model, batch, depths, state, logits, loop, share > 0.6)
        cosine = 0.02 + 0.49 * (1 + math.cos(math.pi * (share - 0.55) / 0.45))
        warm_up = min(1.0, (trainer.step + 1) / 300)
        trainer.update(loss, warm_up * (cosine if share > 0.55 else 1.0))
        trainer.observe(float(is_exact(batch, logits)[:192].float().mean()), 0.85)
        with torch.no_grad():
            for name, tensor in model.weights.items():
                average[name].lerp_(tensor, 1 / min(250, trainer.step))
        tick(trainer, loss.item())
    model.weights = average


def gate_loss(
    model: TinyOuro,
    batch: Batch,
    depths: Tensor,
    state: Tensor,
    logits: Tensor,
    loop: int,
    into_trunk: bool,
) -> Tensor:
    """Teach the gate: exit where the answer is confidently right, at loop 2 in the prompt."""
    gate = model.gate(state if into_trunk else state.detach())
    sure = logits.detach().softmax(-1).gather(-1, batch.final[..., None]).squeeze(-1) > 0.7
    at_answer = binary_cross_entropy_with_logits(
        batch.at_answer(gate), sure.float(), reduction="none"
    )
    answers = (at_answer.mean(-1) * batch.weight).sum() / batch.weight.sum().clamp(min=1e-9)
    places = torch.arange(gate.shape[1], device=gate.device)
    in_prompt = (places < batch.last_prompt[:, None]) & (depths > loop)
    target = torch.full_like(gate, float(loop > 0))
    at_prompt = binary_cross_entropy_with_logits(gate, target, reduction="none")
    prompt = (at_prompt * in_prompt).sum() / in_prompt.sum().clamp(min=1)
    return 0.1 * answers + 0.02 * prompt


def train_huginn(
    model: TinyHuginn, random: Random, clock: Clock, tick: Callable[..., None]
) -> None:
    """The recipe of tiny-huginn: 85 % of the time curriculum, the rest deep fine-tuning."""
    stages = [
        Stage(1, (3, 5), (1, 1)),
        Stage(2, (4, 5), (1, 2)),
        Stage(3, (5, 6), (2, 3)),
        Stage(4, (6, 10), (2, 5)),
    ]
    embedding = model.weights["transformer.wte.weight"]

    def groups(lr: float) -> list[dict[str, Any]]:
        matrices, others = parameters(model, decay=0.01, lr=lr)
        matrices["params"] = [t for t in matrices["params"] if t is not embedding]
        return [matrices, others, {"params": [embedding], "lr": lr / 10, "weight_decay": 0.01}]

    trainer = Trainer(model, stages, random, groups(2e-3))
    last_stage_steps = 0
    while (share := clock.share() / 0.85) < 1:
        stage = stages[trainer.stage]
        is_last = trainer.stage == len(stages) - 1
        last_stage_steps += is_last
        loops = random.randint(*stage.loops)
        scale = min(1.0, last_stage_steps / 150)
        exact, loss = huginn_loss(model, trainer, 96, stage, loops, range(loops), scale)
        cosine = 0.5 * (1 + math.cos(math.pi * (share - 0.75) / 0.25)) if share > 0.75 else 1.0
        trainer.update(loss, min(1.0, (trainer.step + 1) / 100) * cosine)
        if loops == stage.loops[1]:
            trainer.observe(exact, 0.8)
        tick(trainer, loss.item())
    tuner = Trainer(model, stages, random, groups(8e-4))
    tuner.stage, tuner.step = len(stages) - 1, trainer.step
    while (share := (clock.share() - 0.85) / 0.15) < 1:
        loops = random.randint(4, 12)
        at_loops = {loops - 1, *random.sample(range(loops), 2)}
        exact, loss = huginn_loss(model, tuner, 64, stages[-1], loops, at_loops, 1.0)
        tuner.update(loss, 0.5 * (1 + math.cos(math.pi * share)))
        tuner.observe(exact, 0.8)
        tick(tuner, loss.item())


def huginn_loss(
    model: TinyHuginn,
    trainer: Trainer,
    count: int,
    stage: Stage,
    loops: int,
    at_loops: range | set[int],
    scale: float,
) -> tuple[float, Tensor]:
    """Exact match at the last loop, and the loss over `at_loops`, of one fresh batch."""
    random = trainer.random
    batch = Batch.of(trainer.samples(count, stage), loops).to(trainer.device)
    prefill = [loops if random.random() < 0.6 else random.randint(1, loops) for _ in range(count)]
    depths = batch.depths(torch.tensor(prefill, device=trainer.device), loops)
    states = model.loops(batch, depths, scale * initial_states(batch.token_ids, model.hidden))
    losses = []
    for loop, state in enumerate(states):
        if loop in at_loops or loop == loops - 1:
            logits = model.logits(batch, state)
            losses.append(answer_loss(batch, logits, batch.targets[:, loop]))
    return float(is_exact(batch, logits).float().mean()), torch.stack(losses).mean()


def initial_states(token_ids: Tensor, hidden: int) -> Tensor:
    """[B, T, H] random states as Huginn draws them."""
    std = math.sqrt(2 / (5 * hidden))
    states = torch.empty(*token_ids.shape, hidden, device=token_ids.device)
    torch.nn.init.trunc_normal_(states, std=std, a=-3 * std, b=3 * std)
    return states * math.sqrt(hidden)


@torch.no_grad()
def report(model: TinyModel, device: str, num_samples: int = 500) -> None:
    """Print the exact match of the first held-out samples, per loop and hop count."""
    samples = list(islice(held_out(), num_samples))
    batch = Batch.of(samples, 1).to(device)
    hops = torch.tensor([sample.hops for sample in samples])
    hidden = TinyHuginn.hidden
    print(f"Exact match on {num_samples} held-out samples; then by hops 1 to 4")
    for loops in (1, 2, 3, 4) if isinstance(model, TinyOuro) else (1, 2, 3, 4, 8, 12, 16):
        depths = torch.full_like(batch.token_ids, loops)
        *_, state = model.loops(batch, depths, initial_states(batch.token_ids, hidden))
        exact = is_exact(batch, model.logits(batch, state)).float().cpu()
        by_hops = " ".join(f"{float(exact[hops == h].mean()):.3f}" for h in (1, 2, 3, 4))
        print(f"  {loops:2d} loops: {float(exact.mean()):.3f}   {by_hops}")


def save(model: TinyModel, template: Path, out: Path) -> None:
    """Write a Hugging Face directory: the committed model's config and tokenizer, new weights."""
    out.mkdir(parents=True, exist_ok=True)
    for path in template.glob("*.json"):
        shutil.copyfile(path, out / path.name)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.weights.items()}
    if isinstance(model, TinyHuginn):
        weights["freqs_cis"] = model.freqs_cis(512).contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=("ouro", "huginn"), required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")
    template = HERE / f"tiny-{options.family}"
    config = json.loads((template / "config.json").read_text())
    kind = TinyOuro if options.family == "ouro" else TinyHuginn
    train = train_ouro if options.family == "ouro" else train_huginn
    model = kind.create(config)
    model.weights = {name: tensor.to(options.device) for name, tensor in model.weights.items()}
    with Progress() as progress:
        bar = progress.add_task("training", total=1.0)
        clock = Clock(60 * options.minutes, options.device, options.threads)

        def tick(trainer: Trainer, loss: float) -> None:
            words = f"stage {trainer.stage + 1}, step {trainer.step}, loss {loss:.3f}"
            progress.update(
                bar,
                completed=clock.share(),
                description=f"{words}, exact match {trainer.exact:.2f}",
            )
            if trainer.step % 100 == 0:
                progress.console.print(f"{words}, exact match {trainer.exact:.3f}")

        train(model, Random(options.seed), clock, tick)
    save(model, template, options.out)
    report(model, options.device)
    print(f"Wrote {options.out}")


if __name__ == "__main__":
    main()
