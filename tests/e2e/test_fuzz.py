"""Mutated checkpoints and requests: each works or gives a typed error, and nothing is lost."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from looptrt import LLM, SamplingParams
from looptrt.builder.build import BuildConfig, build, make_weights, plan_build
from looptrt.builder.convert import convert
from looptrt.errors import LooptrtError, RequestError
from looptrt.runtime.config import EngineConfig
from tests.support.checkpoints import tiny_huginn, tiny_ouro

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_CHECKPOINTS = 2_000
NUM_REQUESTS = 5_000
WHOLE_BUILD_EVERY = 25

ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 63, 64, 10**9, 10**30, -(2**63)),
    *(0.0, 0.5, 1.0, -0.5, 1e-30, 1e30, math.nan, math.inf, -math.inf),
    *("", "x", "0.5", "float16", "bfloat16", "../x", "\0", "\ud800"),
    *([], {}, [1], ["x"], {"x": 1}, [[1]], (), b"x"),
]
JSON_VALUES = [v for v in ODD_VALUES if not isinstance(v, bytes)]


# ---- checkpoints


def flip_bit(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        # Headers are a thousandth of the file and most of what can go wrong.
        end = len(data) if rng.random() < 0.3 else min(len(data), 4096)
        data[rng.randrange(end)] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


def cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.choice([0, 7, 8, len(data) // 2, len(data) - 1])])


def grow(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.choice([1, 8, 4096])))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def overwrite(path: Path, rng: random.Random) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    path.write_bytes(rng.choice([b"", b"{}", b"[]", b"null", pointer, rng.randbytes(100)]))


def edit_header(path: Path, rng: random.Random) -> None:
    """Rename, reshape, retype, move, drop or double one tensor in a safetensors header."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    match rng.randrange(7):
        case 0:
            header[rng.choice(["x", name + "x", name.upper(), ""])] = header.pop(name)
        case 1:
            entry["shape"] = rng.choice([[], [1], [-1, 2], entry["shape"][::-1], [2**62, 2**62]])
        case 2:
            entry["dtype"] = rng.choice(["F16", "BF16", "F64", "I8", "BOOL", "x", 7, None])
        case 3:
            entry["data_offsets"] = rng.choice([[0, 0], [-1, 4], [8, 4], [0, 2**60], [0], "x"])
        case 4:
            del header[name]
        case 5:
            header[name + ".copy"] = entry
        case 6:
            entry[rng.choice(list(entry))] = rng.choice(JSON_VALUES)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def edit_json(path: Path, rng: random.Random) -> None:
    """Remove, replace or add one key somewhere in a JSON file."""
    try:
        data = json.loads(path.read_text())
    except ValueError:
        return
    holder = data
    for value in list(data.values()):
        if isinstance(value, dict) and value and rng.random() < 0.3:
            holder = value
    key = rng.choice(list(holder) or ["x"])
    match rng.randrange(3):
        case 0:
            holder.pop(key, None)
        case 1:
            holder[key] = rng.choice(JSON_VALUES)
        case 2:
            holder[rng.choice(["x", "rope_scaling", "auto_map", "quantization"])] = rng.choice(
                JSON_VALUES
            )
    path.write_text(json.dumps(data))


ANY_FILE = [flip_bit, cut, grow, remove, overwrite]


def mutate(directory: Path, rng: random.Random) -> str:
    """Change one to three things in a checkpoint; says what."""
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        files = sorted(path for path in directory.iterdir() if path.is_file())
        if not files:
            break
        path = rng.choice(files)
        kinds: list[Callable[[Path, random.Random], None]] = list(ANY_FILE)
        if path.suffix == ".json":
            kinds += [edit_json] * 8
        elif path.suffix == ".safetensors" and path.stat().st_size > 1000:
            kinds += [edit_header] * 8
        kind = rng.choice(kinds)
        try:
            kind(path, rng)
        except (ValueError, KeyError, IndexError, AttributeError):
            overwrite(path, rng)  # already too broken to edit
        done.append(f"{kind.__name__} {path.name}")
    return ", ".join(done)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_mutated_checkpoints_build_or_give_a_typed_error(tmp_path: Path) -> None:
    bases = [
        tiny_ouro(tmp_path / "ouro", shards=2),
        tiny_huginn(tmp_path / "huginn"),
        EXAMPLES / "tiny-huginn",
    ]
    convert(bases[0], tmp_path / "trtllm", to="trtllm", dtype=None)
    bases.append(tmp_path / "trtllm")
    rng = random.Random(7)
    outcomes = {"built": 0, "refused": 0}
    for index in range(NUM_CHECKPOINTS):
        work = tmp_path / "work"
        shutil.copytree(rng.choice(bases), work / "c")
        what = mutate(work / "c", rng)
        try:
            try_build(work, whole=index % WHOLE_BUILD_EVERY == 0)
            outcomes["built"] += 1
        except LooptrtError:
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"mutation {index} ({what}) escaped as {error!r}") from error
        left = {path.name for path in work.iterdir()} - {"c", "weights"}
        assert left <= {"e"}, f"mutation {index} ({what}) left {left}"
        shutil.rmtree(work)
    assert min(outcomes.values()) > NUM_CHECKPOINTS // 20, outcomes


def try_build(work: Path, *, whole: bool) -> None:
    """All that a build reads; the graphs, which do not depend on weights, now and then."""
    config = BuildConfig(work / "c", work / "e")
    if whole:
        build(config)
    else:
        make_weights(plan_build(config), work / "weights")


# ---- requests


def odd_prompt(rng: random.Random) -> object:
    text = "".join(rng.choice("abcz019=;?> é\U0001f600\x00") for _ in range(rng.randrange(40)))
    ids = [rng.randrange(-1, 50) for _ in range(rng.randrange(20))]
    good = [rng.randrange(48) for _ in range(rng.randrange(1, 30))]
    choices = [text, ids, good, good, good, np.array(good), [*good, rng.choice(ODD_VALUES)]]
    return rng.choice([*choices, rng.choice(ODD_VALUES), [good] * 2, [[good]]])


def odd_params(rng: random.Random) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.init]
    plausible: dict[str, list[Any]] = {
        "n": [1, 2],
        "loops": [1, 2, 3],
        "prefill_loops": [1, 2],
        "temperature": [0.0, 0.7],
        "stop": [("5",), ("a", "b")],
        "stop_token_ids": [(5,), [2, 3]],
        "bad_words": [("a",), [[4, 5]]],
        "exit_threshold": [0.5, 1.0],
        "seed": [0, 7],
    }
    chosen = {"max_tokens": rng.choice([1, 2, 3, 4])}
    for name in rng.sample(names, rng.choice([0, 1, 1, 2, 4])):
        sensible = plausible.get(name, [None, 0, 1, 2, 0.5, True, False, "x"])
        chosen[name] = rng.choice(sensible if rng.random() < 0.5 else ODD_VALUES)
    if chosen["max_tokens"] not in (1, 2, 3, 4):
        chosen.pop("n", None)
    return chosen


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["tiny-ouro", "tiny-huginn"])
def test_mutated_requests_are_answered_or_refused(tmp_path: Path, name: str) -> None:
    build(BuildConfig(EXAMPLES / name, tmp_path / "e", max_seq_len=64, tokens_per_block=8))
    rng = random.Random(name)
    outcomes = {"answered": 0, "refused": 0}
    with LLM(tmp_path / "e", EngineConfig(max_batch_size=8), in_process=True) as llm:
        expected = llm.generate([1, 20, 40, 4, 41], SamplingParams(max_tokens=4))
        for index in range(NUM_REQUESTS // 2):
            prompt, fields = odd_prompt(rng), odd_params(rng)
            try:
                llm.generate(prompt, SamplingParams(**fields))  # type: ignore[arg-type]
                outcomes["answered"] += 1
            except RequestError:
                outcomes["refused"] += 1
            except Exception as error:
                what = f"request {index} ({prompt!r}, {fields!r})"
                raise AssertionError(f"{what} escaped as {error!r}") from error
        stats = llm.stats()
        again = llm.generate([1, 20, 40, 4, 41], SamplingParams(max_tokens=4))
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_units"] + stats["num_cached_units"] == stats["num_units"]
    assert again[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert min(outcomes.values()) > NUM_REQUESTS // 20, outcomes
