"""Fit the inverse normal CDF that `looptrt.plugins.noise` evaluates, and print it.

Owns where the noise coefficients come from; leaves their use to `noise`. Rational functions are
interpolated at Chebyshev points in 60-digit arithmetic, rounded to float64 and measured in
float64 against mpmath. Invariant: `noise` holds what this prints.

Run: python benchmarks/fit_noise.py
"""

from __future__ import annotations

from collections.abc import Callable

import mpmath as mp
import numpy as np

from looptrt.plugins import noise

mp.mp.dps = 60
CUT = 3
CENTRE = mp.mpf(noise.CENTRE)
CENTRE_DEGREES = (5, 5)
TAIL_DEGREES = (7, 7)


def inverse_cdf(p: mp.mpf) -> mp.mpf:
    """Inverse of the standard normal CDF."""
    return mp.sqrt(2) * mp.erfinv(2 * p - 1)


def chebyshev(low: mp.mpf, high: mp.mpf, count: int) -> list[mp.mpf]:
    """Chebyshev points of the first kind on [low, high]."""
    nodes = [mp.cos(mp.pi * (2 * i + 1) / (2 * count)) for i in range(count)]
    return [(low + high) / 2 + (high - low) / 2 * node for node in nodes]


def fit(
    function: Callable[[mp.mpf], mp.mpf], points: list[mp.mpf], degrees: tuple[int, int]
) -> tuple[list[float], list[float]]:
    """Rational interpolant with the given numerator and denominator degrees.

    Returns:
        Coefficients of numerator and denominator, constant term first; the denominator's
        constant term is 1.
    """
    top, bottom = degrees
    matrix = mp.zeros(len(points), len(points))
    right = mp.zeros(len(points), 1)
    for i, x in enumerate(points):
        right[i] = function(x)
        for j in range(top + 1):
            matrix[i, j] = x**j
        for j in range(1, bottom + 1):
            matrix[i, top + j] = -right[i] * x**j
    solution = [float(value) for value in mp.lu_solve(matrix, right)]
    return solution[: top + 1], [1.0, *solution[top + 1 :]]


def fit_centre() -> tuple[list[float], list[float]]:
    """Fit z / q in q squared on [0, CENTRE squared]."""
    return fit(
        centre_function, chebyshev(mp.mpf(0), CENTRE**2, sum(CENTRE_DEGREES) + 1), CENTRE_DEGREES
    )


def fit_tail() -> tuple[list[float], list[float]]:
    """Fit z in the root of the tail probability, points spaced in its log: 0 is singular."""
    low, high = mp.sqrt(mp.ncdf(-CUT)), mp.sqrt(mp.mpf(1) / 2 - CENTRE)
    logs = chebyshev(mp.log(low), mp.log(high), sum(TAIL_DEGREES) + 1)
    return fit(tail_function, [mp.exp(value) for value in logs], TAIL_DEGREES)


def centre_function(square: mp.mpf) -> mp.mpf:
    """Return z / q as a function of q squared."""
    if square == 0:
        return mp.sqrt(2 * mp.pi)
    q = mp.sqrt(square)
    return inverse_cdf(mp.mpf(1) / 2 + q) / q


def tail_function(root: mp.mpf) -> mp.mpf:
    """Return z as a function of sqrt(1/2 - q), the root of the upper tail's probability."""
    return -inverse_cdf(root * root)


def max_error(points: int) -> float:
    """Largest absolute error of the float64 evaluation over the truncated range."""
    low = mp.ncdf(-CUT)
    grid = np.linspace(float(low), 1.0 - float(low), points)
    got = noise.inverse_normal_cdf(grid)
    return max(abs(float(z - inverse_cdf(mp.mpf(p)))) for p, z in zip(grid, got, strict=True))


def main() -> None:
    """Print the constants of `noise` and the error of the ones it holds."""
    print(f"TAIL_PROBABILITY = {float(mp.ncdf(-CUT))!r}")
    for name, coefficients in zip(
        ("CENTRE_TOP", "CENTRE_BOTTOM", "TAIL_TOP", "TAIL_BOTTOM"),
        fit_centre() + fit_tail(),
        strict=True,
    ):
        print(f"{name} = (")
        for value in coefficients:
            print(f"    {value!r},")
        print(")")
    print(f"# max error of the committed coefficients: {max_error(20_001):.3e}")


if __name__ == "__main__":
    main()
