"""Quotients and page, unit and split arithmetic of packed_plane_attention, on the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from looptrt.kv_layout import PlaneLayout, PlaneStrategy
from looptrt.plugins import launch

PLUGINS = Path(launch.__file__).resolve().parent
COMPILER = shutil.which("g++") or shutil.which("c++")

PROGRAM = r"""
#include <cstdio>
#include "packed_plane_attention_splits.h"
using namespace looptrt;

int main() {
  char what;
  long a, b, c, d, e, f;
  while (std::scanf(" %c %ld %ld %ld %ld %ld %ld", &what, &a, &b, &c, &d, &e, &f) == 7) {
    if (what == 's') std::printf("%d %d\n", splitOf(a), splitBegin(a));
    if (what == 'd') std::printf("%d %d\n", Divider(b).quotient(a), Divider(b).remainder(a));
    if (what == 'p') std::printf("%d %d\n", PageDivider(b).page(a), PageDivider(b).token(a));
    if (what == 'u') {
      LayerSlot const layer(a, b, c, 3, d);
      std::printf("%lld %lld\n", (long long)layer.offset(e, f, 2), (long long)layer.halfStride());
    }
    if (what == 't') {
      int const table[] = {int(a), int(b)};
      std::printf("%d %d\n", unitOf(table, c, d), unitOf(nullptr, c, d));
    }
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("splits")
    source = folder / "splits.cpp"
    source.write_text(PROGRAM, encoding="utf-8")
    includes = [f"-I{PLUGINS / 'include'}", f"-I{PLUGINS / 'kernels'}"]
    command = [COMPILER, "-std=c++17", "-Wall", "-Werror", *includes, source, "-o"]
    subprocess.run([*command, folder / "splits"], check=True, timeout=120)
    return folder / "splits"


def answers(program: Path, questions: list[tuple[object, ...]]) -> list[list[int]]:
    lines = "".join(" ".join(map(str, (*q, *[0] * (7 - len(q))))) + "\n" for q in questions)
    done = subprocess.run(
        [program], input=lines, capture_output=True, text=True, check=True, timeout=60
    )
    return [list(map(int, line.split())) for line in done.stdout.splitlines()]


def test_splits_are_of_128_then_eight_of_each_doubling(program: Path) -> None:
    begins = [*range(0, 2048, 128), 2048]
    for length in (256 << level for level in range(8)):
        for _ in range(8):
            begins.append(begins[-1] + length)
    got = answers(program, [("s", split) for split in range(len(begins))])
    assert [begin for _, begin in got] == begins
    positions = [p for begin in begins[1:] for p in (begin - 1, begin, begin + 1)]
    got = answers(program, [("s", position) for position in positions])
    want = [sum(begin <= p for begin in begins) - 1 for p in positions]
    assert [split for split, _ in got] == want
    assert answers(program, [("s", 65_535)])[0][0] == 55
    assert answers(program, [("s", 2**30 - 1)])[0][0] == 8 * 19 + 15


def test_a_tile_never_crosses_a_split(program: Path) -> None:
    got = answers(program, [("s", split) for split in range(100)])
    assert all(begin % 64 == 0 for _, begin in got)


@pytest.mark.parametrize("page_size", [1, 3, 7, 16, 24, 128])
def test_pages_and_tokens_of_positions(program: Path, page_size: int) -> None:
    positions = [0, 1, page_size - 1, page_size, 5 * page_size + 1, 2**30 - 1]
    got = answers(program, [("p", position, page_size) for position in positions])
    assert got == [list(divmod(position, page_size)) for position in positions]


def test_quotients_by_what_the_host_knows(program: Path) -> None:
    most = 2**31 - 1
    near_powers = {2**bits + step for bits in range(31) for step in (-1, 0, 1)}
    divisors = sorted(d for d in near_powers | {5, 6, 7, 9, 55, 440, 641, most} if 1 <= d <= most)
    numbers = {
        d: {0, 1, d - 1, d, most, most - 1, most // d * d, most // d * d - 1} for d in divisors
    }
    questions = [("d", number, d) for d in divisors for number in sorted(numbers[d])]
    got = answers(program, questions)
    assert got == [list(divmod(number, d)) for _, number, d in questions]


def test_offsets_are_those_of_the_pool_s_tensor(program: Path) -> None:
    layout = PlaneLayout(
        unit_slots=5,
        prelude_layers=0,
        coda_layers=0,
        max_loops=2,
        page_size=6,
        num_kv_heads=3,
        head_dim=8,
        dtype="float32",
        strategy=PlaneStrategy.parse("latest", 5),
    )
    pool = torch.empty(4, *layout.unit_shape, device="meta")
    places = [(0, 0, 0), (3, 4, 5), (2, 1, 3)]
    got = answers(program, [("u", 5, slot, 6, 8, unit, token) for unit, slot, token in places])
    for (unit, slot, token), (offset, half) in zip(places, got, strict=True):
        assert offset == pool[unit, slot, 0, token, 2].storage_offset()
        assert offset + half == pool[unit, slot, 1, token, 2].storage_offset()


def test_offsets_pass_two_to_the_31(program: Path) -> None:
    [[offset, _]] = answers(program, [("u", 24, 23, 32, 128, 100_000, 31)])
    assert offset == ((100_000 * 24 + 23) * 2 * 32 + 31) * 3 * 128 + 2 * 128


def test_only_units_of_the_pool_are_units(program: Path) -> None:
    ids = [0, -1, 1, 9, 10, -(2**31), 2**31 - 1]
    got = answers(program, [("t", unit, 3, 0, 10) for unit in ids])
    assert got == [[unit if 0 < unit < 10 else 0, 0] for unit in ids]
