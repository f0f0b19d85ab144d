"""The noise of the initial state: golden bits, an independent evaluation, its statistics."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

from looptrt.plugins import noise
from looptrt.plugins import ops as _ops  # noqa: F401 - registers the operators
from tests.plugins.pools import assert_bitwise, int32

OPS = torch.ops.looptrt
GOLDEN = Path(__file__).parent / "golden" / "noise.json"
MASK = (1 << 64) - 1
STD, SCALE = math.sqrt(2 / (5 * 5280)), math.sqrt(5280)


def draw(seed: int, position: int, channel: int) -> tuple[float, float]:
    """(u, z) with Python's own integers and floats, written from the definition."""

    def mix64(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    h = mix64((seed + 0x6A09E667F3BCC909) & MASK)
    h = mix64(h ^ mix64((position + 0xBB67AE8584CAA73B) & MASK))
    h = mix64(h ^ mix64((channel + 0x3C6EF372FE94F82B) & MASK))
    u = ((h >> 40) + 0.5) * 2.0**-24
    return u, quantile(noise.TAIL_PROBABILITY + u * (1.0 - 2.0 * noise.TAIL_PROBABILITY))


def quantile(p: float) -> float:
    def rational(top: tuple[float, ...], bottom: tuple[float, ...], x: float) -> float:
        values = []
        for coefficients in (top, bottom):
            value = coefficients[-1]
            for coefficient in coefficients[-2::-1]:
                value = value * x + coefficient
            values.append(value)
        return values[0] / values[1]

    q = p - 0.5
    if abs(q) <= 0.40625:
        return q * rational(noise.CENTRE_TOP, noise.CENTRE_BOTTOM, q * q)
    return math.copysign(rational(noise.TAIL_TOP, noise.TAIL_BOTTOM, math.sqrt(0.5 - abs(q))), q)


def hexadecimal(value: float) -> str:
    return struct.pack(">d", value).hex()


def test_golden_vectors_have_not_moved() -> None:
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert len(golden) >= 12
    for vector in golden:
        seed, position, channel = vector["seed"], vector["position"], vector["channel"]
        arrays = np.array([seed], np.int64), np.array([position], np.int32)
        u = noise.uniform(*arrays, channel + 1)[0, channel]
        z = noise.truncated_normal(*arrays, channel + 1)[0, channel]
        assert (hexadecimal(u), hexadecimal(z)) == (vector["u"], vector["z"]), vector


def test_numpy_agrees_with_plain_python_bit_for_bit() -> None:
    random = np.random.default_rng(0)
    seeds = random.integers(-(2**63), 2**63 - 1, 40, dtype=np.int64)
    positions = random.integers(0, 2**31 - 1, 40, dtype=np.int32)
    u = noise.uniform(seeds, positions, 60)
    z = noise.truncated_normal(seeds, positions, 60)
    for i in range(40):
        for channel in range(60):
            want = draw(int(seeds[i]), int(positions[i]), channel)
            assert (u[i, channel], z[i, channel]) == want


def test_inverse_cdf_is_close_to_the_true_one() -> None:
    low = NormalDist().cdf(-3.0)
    p = np.linspace(low, 1.0 - low, 50_001)
    got = noise.inverse_normal_cdf(p)
    want = np.array([NormalDist().inv_cdf(value) for value in p.tolist()])
    assert np.abs(got - want).max() < 1e-9
    assert abs(noise.TAIL_PROBABILITY - low) < 1e-15


def test_inverse_cdf_is_exactly_odd() -> None:
    p = np.random.default_rng(1).integers(2**44, 2**52, 20_000) / 2.0**53
    np.testing.assert_array_equal(noise.inverse_normal_cdf(p), -noise.inverse_normal_cdf(1.0 - p))


def sample(tokens: int, channels: int, dtype: torch.dtype, **changes: float) -> Tensor:
    like = torch.empty(tokens, channels, dtype=dtype)
    positions = torch.arange(tokens, dtype=torch.int32)
    seeds = torch.zeros(tokens, dtype=torch.int64)
    return OPS.position_keyed_noise(
        like, positions, seeds, **{"std": STD, "scale": SCALE, **changes}
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_statistics_are_those_of_the_cut_normal(dtype: torch.dtype) -> None:
    """Case B2."""
    x = sample(200, 5280, dtype).double()
    assert x.numel() >= 1_000_000
    assert abs(x.mean()) <= 0.003
    assert abs(x.std() - 0.624) <= 0.003
    bf16_step = 2.0**-7
    assert x.abs().max() <= 1.8975 + bf16_step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding_goes_float32_dtype_then_one_float32_product(dtype: torch.dtype) -> None:
    got = sample(3, 40, dtype)
    z = [[draw(0, position, channel)[1] for channel in range(40)] for position in range(3)]
    drawn = torch.tensor(np.float32(np.array(z) * float(np.float32(STD)))).to(dtype)
    scale = torch.tensor(np.float32(SCALE))
    assert_bitwise(got, (drawn.float() * scale).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_std_zero_is_plus_zero(dtype: torch.dtype) -> None:
    assert_bitwise(sample(4, 50, dtype, std=0.0), torch.zeros(4, 50, dtype=dtype))


def test_a_token_s_noise_depends_on_nothing_around_it() -> None:
    positions = int32([5, 0, 5, 9])
    seeds = torch.tensor([7, 7, 8, -1])
    like = torch.empty(4, 33)
    whole = OPS.position_keyed_noise(like, positions, seeds, std=STD, scale=SCALE)
    for i in (3, 1, 0, 2):
        alone = OPS.position_keyed_noise(
            like[:1, :20], positions[i : i + 1], seeds[i : i + 1], std=STD, scale=SCALE
        )
        assert_bitwise(alone[0], whole[i, :20])
    assert len({tuple(row) for row in whole.tolist()}) == 4


def test_committed_coefficients_are_those_the_fit_prints() -> None:
    """The constants of `noise` and of benchmarks/fit_noise.py do not drift apart."""
    fit_noise = pytest.importorskip("fit_noise")
    centre, tail = fit_noise.fit_centre(), fit_noise.fit_tail()
    assert [tuple(part) for part in centre] == [noise.CENTRE_TOP, noise.CENTRE_BOTTOM]
    assert [tuple(part) for part in tail] == [noise.TAIL_TOP, noise.TAIL_BOTTOM]
    assert fit_noise.max_error(501) < 1e-10
