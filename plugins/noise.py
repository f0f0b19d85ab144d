"""The random initial state as a function of (seed, position, channel), bit for bit.

Owns the hash and the truncated normal of docs/exactness.md in NumPy, the arithmetic the CUDA
kernel repeats; leaves rounding to a model dtype to `reference`. Invariant: float64 from + - * /
and sqrt only, each correctly rounded and never fused, so every machine draws the same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]
UInt64Array = NDArray[np.uint64]

# Odd, distinct: the first 64 fractional bits of sqrt(2), sqrt(3) and sqrt(5), lowest bit set.
SEED_KEY = np.uint64(0x6A09E667F3BCC909)
POSITION_KEY = np.uint64(0xBB67AE8584CAA73B)
CHANNEL_KEY = np.uint64(0x3C6EF372FE94F82B)

# The normal is cut at 3 standard deviations: TAIL_PROBABILITY is the normal CDF at -3.
TAIL_PROBABILITY = 0.0013498980316300946
CENTRE = 0.40625  # |p - 1/2| up to here uses the centre form
CENTRE_TOP = (
    2.506628274631039,
    -26.282632438564846,
    98.5654153372488,
    -156.1416265720055,
    92.04679467386218,
    -10.17733294481539,
)
CENTRE_BOTTOM = (
    1.0,
    -11.532450871168004,
    49.09575817619416,
    -93.3967556728517,
    74.7818870293718,
    -17.53071637851671,
)
TAIL_TOP = (
    4.968010601901514,
    1635.6220194671469,
    94441.78478828217,
    1381774.616339814,
    4121153.951285866,
    -5923508.5815925,
    -7613761.384551315,
    4899787.298407226,
)
TAIL_BOTTOM = (
    1.0,
    412.7725531161313,
    29338.129014538492,
    564135.1816576454,
    3016580.0417480352,
    2323436.014406222,
    -3657536.9385840204,
    -249225.2603991401,
)


def mix64(x: UInt64Array) -> UInt64Array:
    """Scramble 64-bit words one to one.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(
    seeds: NDArray[np.int64], positions: NDArray[np.int32], num_channels: int
) -> Float64Array:
    """Draw numbers in (0, 1), odd multiples of 2**-25.

    Args:
        seeds: [T] noise seeds, taken modulo 2**64.
        positions: [T] token positions.
        num_channels: H.

    Returns:
        [T, H] float64.
    """
    h = mix64(seeds.astype(np.uint64) + SEED_KEY)
    h = mix64(h ^ mix64(positions.astype(np.uint64) + POSITION_KEY))
    channels = mix64(np.arange(num_channels, dtype=np.uint64) + CHANNEL_KEY)
    words = mix64(h[:, None] ^ channels) >> np.uint64(40)
    return (words.astype(np.float64) + 0.5) * 2.0**-24


def inverse_normal_cdf(p: Float64Array) -> Float64Array:
    """Inverse normal CDF between -3 and 3 standard deviations, absolute error below 1e-9.

    Exactly odd about 1/2. Rational in q = p - 1/2 near the centre and in sqrt(1/2 - |q|)
    towards the cuts.

    Args:
        p: float64 in [TAIL_PROBABILITY, 1 - TAIL_PROBABILITY].

    Returns:
        float64 of p's shape.

    Source: fitted by benchmarks/fit_noise.py.
    """
    q = p - 0.5
    magnitude = np.abs(q)
    z = np.empty_like(q)
    is_centre = magnitude <= CENTRE
    centre = q[is_centre]
    square = centre * centre
    z[is_centre] = centre * (_horner(CENTRE_TOP, square) / _horner(CENTRE_BOTTOM, square))
    is_tail = ~is_centre
    root = np.sqrt(0.5 - magnitude[is_tail])
    upper = _horner(TAIL_TOP, root) / _horner(TAIL_BOTTOM, root)
    z[is_tail] = np.copysign(upper, q[is_tail])
    return z


def truncated_normal(
    seeds: NDArray[np.int64], positions: NDArray[np.int32], num_channels: int
) -> Float64Array:
    """Draw a standard normal cut at 3 standard deviations for every (token, channel).

    Args:
        seeds: [T] noise seeds.
        positions: [T] token positions.
        num_channels: H.

    Returns:
        [T, H] float64; a value depends on its own seed, position and channel alone.
    """
    u = uniform(seeds, positions, num_channels)
    return inverse_normal_cdf(TAIL_PROBABILITY + u * (1.0 - 2.0 * TAIL_PROBABILITY))


def _horner(coefficients: tuple[float, ...], x: Float64Array) -> Float64Array:
    """Polynomial with the constant term first, from the highest term down."""
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value
