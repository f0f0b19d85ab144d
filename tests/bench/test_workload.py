"""Prompts, arrivals and arms: equal from equal seeds, refused when malformed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from looptrt.bench.arms import (
    Arm,
    KvLayout,
    all_layers_bytes,
    tokens_held,
    with_default,
)
from looptrt.bench.changes import CHANGES, Change, Rung, changes_named
from looptrt.bench.poisson import bracket
from looptrt.bench.setup import Setup, interleave
from looptrt.bench.workload import (
    Lengths,
    Question,
    arrival_times,
    conversations,
    random_prompts,
    read_questions,
)
from looptrt.errors import EngineError, LooptrtError, RequestError
from looptrt.kv_layout import PlaneLayout, PlaneStrategy
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.sampling_params import SamplingParams


def layout(prelude: int, core: int, coda: int, loops: int) -> PlaneLayout:
    return PlaneLayout(
        unit_slots=core,
        prelude_layers=prelude,
        coda_layers=coda,
        max_loops=loops,
        page_size=32,
        num_kv_heads=1,
        head_dim=2,
        dtype="bfloat16",
        strategy=PlaneStrategy.parse("latest", core),
    )


OURO, HUGINN = layout(0, 24, 0, 4), layout(2, 4, 2, 32)


def test_prompts_follow_from_their_seed_alone() -> None:
    prompts = random_prompts(3, 50, 10, 7, "a")
    assert prompts == random_prompts(3, 50, 10, 7, "a")
    assert prompts != random_prompts(3, 50, 10, 8, "a")
    assert [len(prompt) for prompt in prompts] == [50, 50, 50]
    assert {token for prompt in prompts for token in prompt} == set(range(10))


def test_arrivals_have_the_rate_and_scale_with_it() -> None:
    times = arrival_times(4.0, 4000, 0)
    assert times == sorted(times)
    assert statistics.fmean(b - a for a, b in itertools.pairwise(times)) == (
        pytest.approx(0.25, rel=0.05)
    )
    assert arrival_times(8.0, 10, 0) == pytest.approx([t / 2 for t in times[:10]])


def test_conversations_share_their_system_prompt_and_nothing_else() -> None:
    first, second = conversations(2, 3, 1000, system=8, turn=5, seed=0)
    assert first.system == second.system
    assert len(first.system) == 8
    assert [len(turn) for turn in first.turns] == [5, 5, 5]
    assert not set(map(tuple, first.turns)) & set(map(tuple, second.turns))


@pytest.mark.parametrize("text", ["512", "512:", "0:4", "a:b", "1:2:3", "-1:4"])
def test_malformed_lengths_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="expected PROMPT:ANSWER"):
        Lengths.parse(text)


def test_questions_are_lines_or_json_and_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "questions"
    path.write_text('{"prompt": "a", "answer": "b", "hops": 1}\n\nplain text\n')
    assert read_questions(path, need_answers=False) == [
        Question("a", "b"),
        Question("plain text", None),
    ]
    with pytest.raises(RequestError, match="questions:3: expected a JSON object"):
        read_questions(path, need_answers=True)
    path.write_text('{"prompt": "a"}')
    with pytest.raises(RequestError, match="questions:1: expected a text under 'answer'"):
        read_questions(path, need_answers=True)
    for content, message in (("{", "not JSON"), ("\n", "no prompt")):
        path.write_text(content)
        with pytest.raises(RequestError, match=message):
            read_questions(path, need_answers=False)
    path.write_text('{"prompt":' + "[" * 100_000)
    with pytest.raises(RequestError, match="questions:1: not JSON"):
        read_questions(path, need_answers=False)
    path.write_bytes(b"\xff")
    with pytest.raises(RequestError, match="not UTF-8"):
        read_questions(path, need_answers=False)


def test_questions_of_other_editors_and_texts_with_other_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "questions"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b\xe2\x80\xa8c\xc2\x85d"}\r\n')
    assert read_questions(path, need_answers=False) == [
        Question("a", None),
        Question("b\u2028c\x85d", None),
    ]


def test_an_arms_fields_reach_engine_and_request() -> None:
    arm = Arm.parse("mine=enable_prefix_cache:false,max_batch_size:3,loops:2,prefix_depth:at_least")
    config = arm.engine_config(EngineConfig(max_waiting=5))
    assert config == EngineConfig(
        max_waiting=5, enable_prefix_cache=False, max_batch_size=3, prefix_depth="at_least"
    )
    assert arm.params(SamplingParams(top_k=4)) == SamplingParams(top_k=4, loops=2)
    assert arm.kv_layout is KvLayout.UNITS
    assert Arm.parse("x=kv_layout:all_layers").kv_layout is KvLayout.ALL_LAYERS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine=nothing:1", "arm mine: unknown field 'nothing'; known: .*enable_prefix_cache"),
        ("mine=loops", "arm mine: expected field:value, got 'loops'"),
        ("mine=", "arm mine: expected field:value"),
        ("=loops:1", "expected a name"),
        ("default=loops:1", "expected a name of its own"),
        ("other", "expected name=field:value,… or base"),
        ("mine=kv_layout:planes", "expected units or all_layers"),
        ("mine=n:2", "unknown field 'n'"),
    ],
)
def test_malformed_arms_are_refused(text: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Arm.parse(text)


def test_a_bad_value_is_the_engines_or_the_requests_error() -> None:
    with pytest.raises(EngineError, match="max_batch_size: expected"):
        Arm.parse("mine=max_batch_size:0").engine_config(EngineConfig())
    with pytest.raises(RequestError, match="loops: expected"):
        Arm.parse("mine=loops:0").params(SamplingParams())


def test_two_arms_of_one_name_are_refused() -> None:
    with pytest.raises(EngineError, match="twice"):
        with_default([Arm("a"), Arm("a")])
    assert [arm.name for arm in with_default([Arm("a")])] == ["default", "a"]


def test_a_switch_that_is_not_there_is_an_error_and_never_left_out() -> None:
    with pytest.raises(EngineError, match="arm mine: this looptrt has no setting 'warp_drive'"):
        Arm("mine", {"warp_drive": True})
    change = dataclasses.replace(CHANGES[0], off={"warp_drive": False})
    with pytest.raises(EngineError, match="warp_drive"):
        change.arms(4)


def test_huginn_pages_need_nearly_twice_the_memory_with_all_layers_in_each_plane() -> None:
    assert HUGINN.all_layers_units(32) == 64  # 32 planes of 8 layers, in units of 4
    assert OURO.all_layers_units(4) == 4
    units = 33 * 100
    assert tokens_held(HUGINN, units, 32, KvLayout.UNITS) == 3200
    assert tokens_held(HUGINN, units, 32, KvLayout.ALL_LAYERS) == 51 * 32
    ratio = HUGINN.all_layers_units(32) / HUGINN.units_of_page(32)
    assert ratio >= 1.93
    assert tokens_held(OURO, 400, 4, KvLayout.ALL_LAYERS) == 3200


def test_a_pool_that_counts_as_all_layers_holds_as_few_tokens() -> None:
    units = 33 * 100
    num_bytes = all_layers_bytes(HUGINN, (units + 1) * HUGINN.unit_bytes)
    held = tokens_held(HUGINN, num_bytes // HUGINN.unit_bytes - 1, 32, KvLayout.UNITS)
    assert held == tokens_held(HUGINN, units, 32, KvLayout.ALL_LAYERS)
    assert all_layers_bytes(OURO, 401 * OURO.unit_bytes) == 401 * OURO.unit_bytes


def test_arms_alternate_and_the_first_repeat_is_dropped() -> None:
    order: list[tuple[str, int]] = []

    def once(name: str, repeat: int) -> int:
        order.append((name, repeat))
        return len(order)

    outcomes = interleave(["a", "b"], 2, once)
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert (outcomes["a"].dropped, outcomes["a"].kept) == ([1], [4, 5])
    assert (outcomes["b"].dropped, outcomes["b"].kept) == ([2], [3, 6])


def test_requests_of_a_run_differ_in_seed_and_share_a_salt() -> None:
    setup = Setup(Path(), params=SamplingParams(temperature=0.5), seed=10)
    first, second = (
        setup.request(Arm("x", request={"loops": 2}), index, output_tokens=9, salt="s")
        for index in range(2)
    )
    assert (first.max_tokens, first.ignore_eos, first.loops, first.cache_salt) == (
        9,
        True,
        2,
        "x: s",
    )
    assert (first.seed, second.seed, first.temperature) == (10, 11, 0.5)


def test_settings_out_of_range_are_refused() -> None:
    for fields in ({"repeats": 0}, {"deadline_s": 0.0}, {"deadline_s": 1e9}):
        with pytest.raises(EngineError, match="expected"):
            Setup(Path(), **fields)  # type: ignore[arg-type]


def tried_by_bracket(limit: float, lowest: float) -> tuple[list[float], tuple]:
    rates: list[float] = []

    def holds(rate: float) -> bool:
        rates.append(rate)
        return rate <= limit

    return rates, bracket(4.0, lowest, holds)


def test_the_search_doubles_or_halves_until_the_answer_turns() -> None:
    assert tried_by_bracket(20.0, 0.1) == ([4, 8, 16, 32], (16, 32))
    assert tried_by_bracket(1.5, 0.1) == ([4, 2, 1], (1, 2))
    assert tried_by_bracket(0.0, 0.9) == ([4, 2, 1], (None, 1))
    rates, found = tried_by_bracket(1e9, 0.1)
    assert (len(rates), found) == (11, (4096, None))


# ---- the ladder's table


def known_switches() -> list:
    return [change for change in CHANGES if {*change.on, *change.off} <= settings()]


def settings() -> set[str]:
    return set(EngineConfig.__dataclass_fields__)


def test_every_change_has_one_side_that_is_the_default() -> None:
    for change in known_switches():
        names = [arm.name for arm in change.arms(8)]
        assert names.count("default") == 1, change.name
        assert (names[0] == "default") is change.is_default


def test_the_table_in_the_docs_is_that_of_the_changes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "bench.md").read_text("utf-8")
    lines = text.partition("| change | rung |")[2].partition("\n\n")[0].splitlines()[2:]
    told = {}
    for line in lines:
        name, rung, default, switch = (cell.strip() for cell in line.strip("|").split("|"))
        told[name] = (rung[:2], default.partition(":")[0] == "yes", switch.split("`")[1])
    for change in CHANGES:
        switches = {*change.on, *change.off, *change.on_request, *change.off_request}
        rung, is_default, switch = told.pop(change.name)
        assert (rung, is_default) == (change.rung, change.is_default), change.name
        assert switch in (switches or {"kv_layout"}), change.name
    assert told == {}


def test_the_default_is_read_off_the_settings_and_not_declared() -> None:
    (cache,) = changes_named(("prefix cache",))
    assert cache.is_default
    assert not dataclasses.replace(cache, off={"enable_prefix_cache": True}).is_default
    (shallow,) = changes_named(("shallow prompt",))
    assert not shallow.is_default
    assert shallow.arms(8)[0].request == {"prefill_loops": 4}


def unproven_defaults(changes: Sequence[Change], ladders: Sequence[dict]) -> list[str]:
    """R3 changes that are defaults without a pass on 4,000 samples, or with anything but one."""
    unproven = []
    for change in changes:
        rows = [ladder["arms"].get(change.name, {}) for ladder in ladders]
        found = [row["quality"] for row in rows if "quality" in row]
        verdicts = {quality["verdict"] for quality in found}
        is_proven = verdicts == {"pass"} and max(q["num_samples"] for q in found) >= 4000
        if change.rung is Rung.R3 and change.is_default and not is_proven:
            unproven.append(change.name)
    return unproven


def test_a_change_of_arithmetic_is_a_default_only_where_its_quality_was_a_pass() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    ladders = [json.loads(path.read_text()) for path in results.glob("ladder*.json")]
    assert unproven_defaults(CHANGES, ladders) == []
    risky = Change("risky", Rung.R3, "nothing", off={"enable_prefix_cache": False})
    assert unproven_defaults([risky], ladders) == ["risky"]
    for verdict, samples, expected in (
        ("pass", 4096, []),
        ("pass", 500, ["risky"]),
        ("unresolved", 4096, ["risky"]),
        ("fail", 4096, ["risky"]),
    ):
        row = {"quality": {"verdict": verdict, "num_samples": samples}}
        assert unproven_defaults([risky], [{"arms": {"risky": row}}]) == expected


def test_unknown_changes_are_refused_with_the_known_ones() -> None:
    with pytest.raises(LooptrtError, match="expected one of plane units, "):
        changes_named(("warp drive",))
    assert changes_named(()) == CHANGES
