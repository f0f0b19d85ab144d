"""The decode-step benchmark's own parts, on the CPU: what it runs and what it counts as GEMMs."""

from __future__ import annotations

import pytest
import torch

import decode_step

SMALL = {
    "Ouro-1.4B": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 128,
    },
    "Huginn-0125": {
        "n_embd": 96,
        "n_heads": 4,
        "intermediate_size": 64,
        "mean_recurrence": 3,
        "vocab_size": 128,
    },
}
# Four products a layer, an adapter a loop where there is one, and the head.
PRODUCTS = {"Ouro-1.4B": 4 * 2 * 4 + 1, "Huginn-0125": 4 * (2 + 4 * 3 + 2) + 3 + 1}


def small_step(model: str, batch: int) -> decode_step.DecodeStep:
    parse, config = decode_step.CONFIGS[model]
    spec = parse({**config, **SMALL[model]}, model)
    return decode_step.DecodeStep(spec, batch, torch.device("cpu"), kv_length=40)


@pytest.mark.parametrize("model", SMALL)
def test_gemms_alone_are_every_product_of_the_step(model: str) -> None:
    step = small_step(model, 3)
    with decode_step._Products() as mode:
        logits = step.logits()
    assert len(mode.calls) == PRODUCTS[model]
    assert logits.shape == (3, 128)
    assert torch.equal(decode_step.products_of(step)()[-1].float(), logits)


def test_the_models_are_of_the_released_sizes() -> None:
    ouro, huginn = map(decode_step.spec_of, decode_step.CONFIGS)
    assert (ouro.core_layers * ouro.num_loops, ouro.qkv_size, ouro.head_dim) == (96, 6144, 128)
    assert (huginn.core_layers * huginn.num_loops, huginn.head_dim) == (128, 96)
    assert huginn.adapter
