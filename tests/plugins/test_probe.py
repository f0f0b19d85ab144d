"""The probe of kernels: what it compares, that it can fail, and what is kept of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from looptrt.errors import PluginError
from looptrt.kv_layout import PlaneLayout
from looptrt.loop_spec import LoopSpec, NoiseMode
from looptrt.models import ouro, raven
from looptrt.models.blocks import build
from looptrt.models.operator_calls import calls_of
from looptrt.plugins import launch, reference, schema, unfused
from looptrt.plugins.ops import Operators
from looptrt.plugins.probe import (
    ATTENTION,
    QUICK_ROWS,
    Clock,
    OpCall,
    Verdict,
    failures,
    probe_rows,
)
from looptrt.plugins.probe_attention import check_bits, make_scene, probe_attention
from looptrt.plugins.schema import Exactness
from looptrt.plugins.verdict_cache import VerdictCache
from tests.plugins.pools import Pool, int32
from tests.support.checkpoints import huginn_config, llama_config, olmo_config, ouro_config

CPU = torch.device("cpu")
FORMS: dict[str, Callable[..., Any]] = {op.name: getattr(reference, op.name) for op in schema.OPS}
SPECS = {
    "ouro": ouro.parse_config(ouro_config(), "ouro"),
    "huginn": raven.parse_config(huginn_config(), "huginn"),
    "olmo": raven.parse_config(olmo_config(), "olmo"),
    "llama": raven.parse_config(llama_config(), "llama"),
}


def calls_for(spec: LoopSpec, dtype: str = "bfloat16") -> list[OpCall]:
    layout = PlaneLayout.of(spec, page_size=8, max_loops=4, dtype=dtype, kv_planes="latest")
    model = build(
        spec,
        layout,
        max_positions=64,
        dtype=getattr(torch, dtype),
        noise_mode=NoiseMode.POSITION,
        device="meta",
    )
    return calls_of(model, layout)


def probed(spec: LoopSpec, **wrong: Callable[..., Any]) -> dict[str, Verdict]:
    verdicts = probe_rows(calls_for(spec), QUICK_ROWS, CPU, FORMS | wrong, Clock(None))
    return {verdict.call.op: verdict for verdict in verdicts}


def attention_call(spec: LoopSpec) -> OpCall:
    return [call for call in calls_for(spec) if call.op == ATTENTION][-1]


def test_calls_of_all_families_cover_every_operator() -> None:
    used = {name: {call.op for call in calls_for(spec)} for name, spec in SPECS.items()}
    assert set.union(*used.values()) == {op.name for op in schema.OPS}
    assert "fenced_bias_rope" in used["huginn"]
    assert "fenced_qk_norm" in used["olmo"]
    assert "position_keyed_noise" not in used["ouro"]
    sizes = [dict(call.sizes) for call in calls_for(SPECS["ouro"]) if call.op == "fenced_silu_mul"]
    assert sizes == [{"I": SPECS["ouro"].intermediate_size}]


@pytest.mark.parametrize("name", SPECS)
def test_sound_kernels_hold_at_every_row_count(name: str) -> None:
    verdicts = probed(SPECS[name])
    assert not list(failures(verdicts.values()))
    for verdict in verdicts.values():
        assert verdict.rows == list(QUICK_ROWS)


def test_one_wrong_bit_in_one_row_count_is_found() -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        y = reference.fenced_rms_norm(x, weight, eps=eps)
        if len(x) == 17:
            y.view(torch.int16)[3, 5] ^= 1
        return y

    verdicts = probed(SPECS["ouro"], fenced_rms_norm=wrong)
    assert [verdict.call.op for verdict in failures(verdicts.values())] == ["fenced_rms_norm"]
    failed = verdicts["fenced_rms_norm"]
    assert failed.mismatches == 1
    assert "bfloat16 [[17, 64], [64]]: 1 of 1088 differ" in failed.first


def test_negative_zero_counts_as_different() -> None:
    def wrong(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return -x.index_select(0, rows)

    def zeros(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x.index_select(0, rows))

    for kernel in (wrong, zeros):
        assert not probed(SPECS["ouro"], compact_gather=kernel)["compact_gather"].holds


def test_a_kernel_that_refuses_a_shape_fails() -> None:
    def picky(gate_up: torch.Tensor) -> torch.Tensor:
        if len(gate_up) > 16:
            raise PluginError("fenced_silu_mul: cudaErrorInvalidValue")
        return reference.fenced_silu_mul(gate_up)

    failed = probed(SPECS["ouro"], fenced_silu_mul=picky)["fenced_silu_mul"]
    assert not failed.holds
    assert "cudaErrorInvalidValue" in failed.first


def test_a_clock_that_is_over_leaves_the_first_row_count_of_every_call() -> None:
    calls = calls_for(SPECS["ouro"])
    verdicts = probe_rows(calls, QUICK_ROWS, CPU, FORMS, Clock(-1.0))
    assert {verdict.call.op for verdict in verdicts} == {call.op for call in calls} - {ATTENTION}
    assert all(verdict.rows == [1] and verdict.holds for verdict in verdicts)
    assert not Verdict(calls[0], Exactness.EQUALS_TORCH, "nothing yet").holds


# ---- attention


@pytest.mark.parametrize("name", ["ouro", "huginn", "llama"])
def test_the_twin_agrees_with_torchs_attention(name: str) -> None:
    call = attention_call(SPECS[name])
    (verdict,) = probe_attention([call], CPU, FORMS, Clock(None))
    assert verdict.holds, verdict.first
    assert verdict.level is Exactness.TOLERANCE


def test_attention_that_is_off_by_a_fiftieth_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*operands: torch.Tensor, **attributes: Any) -> torch.Tensor:
        return 1.02 * reference.packed_plane_attention(*operands, **attributes)

    monkeypatch.setattr(unfused, "packed_plane_attention", wrong)
    (verdict,) = probe_attention([attention_call(SPECS["ouro"])], CPU, FORMS, Clock(None))
    assert not verdict.holds


def bits_verdict(kernel: Callable[..., Any]) -> Verdict:
    call = attention_call(SPECS["ouro"])
    verdict = Verdict(call, Exactness.BATCH_INVARIANT, "itself")
    check_bits(verdict, kernel, make_scene(call, CPU))
    return verdict


def row_by_row(*operands: torch.Tensor, **attributes: Any) -> torch.Tensor:
    """Attention that cannot know its neighbours: every row is a call of its own."""
    qkv, positions, cu_seqlens, seq_slots, *kv = operands
    rows = []
    for seq, slot in enumerate(seq_slots.tolist()):
        for row in range(int(cu_seqlens[seq]), int(cu_seqlens[seq + 1])):
            one = slice(row, row + 1)
            single = (qkv[one], positions[one], int32([0, 1]), int32([slot]))
            rows.append(reference.packed_plane_attention(*single, *kv, **attributes))
    return torch.cat(rows)


@pytest.mark.full
def test_attention_that_knows_no_neighbours_keeps_its_bits() -> None:
    verdict = bits_verdict(row_by_row)
    assert verdict.holds, verdict.first


@pytest.mark.full
def test_attention_whose_sums_follow_the_batch_is_found() -> None:
    def batched(*operands: torch.Tensor, **attributes: Any) -> torch.Tensor:
        attended = row_by_row(*operands, **attributes)
        return attended * (1 + 2**-7) if len(operands[3]) > 1 else attended

    verdict = bits_verdict(batched)
    assert not verdict.holds
    assert "alone" in verdict.first


def test_unwritten_memory_in_a_result_is_found() -> None:
    def leaky(*operands: torch.Tensor, **attributes: Any) -> torch.Tensor:
        attended = reference.packed_plane_attention(*operands, **attributes)
        return torch.where(operands[1][:, None] == 0, math.nan, attended)

    verdict = bits_verdict(leaky)
    assert not verdict.holds


def test_unfused_attention_equals_the_twin_with_gaps_and_poisoned_memory() -> None:
    """Rows with gaps in their positions, an empty sequence, GQA, NaN everywhere else."""
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 4, "unit_slots": 2}
    place = {"row": 1, "slot": 1, "scale": 0.3}
    table = torch.zeros(3, 3, 4, dtype=torch.int32)
    table[2, 2], table[0, 2] = int32([5, 3, 1, 7]), int32([2, 6, 4, 8])
    generator = torch.Generator().manual_seed(0)
    results = []
    for function in (reference.packed_plane_attention, unfused.packed_plane_attention):
        pool = Pool.of(9, (2, 2, 4, 2, 8), torch.float32)
        outputs = []
        generator.manual_seed(0)
        for positions, bounds in (
            ([*range(11), *range(6)], [0, 11, 11, 17]),
            ([11, 13, 6, 9], [0, 2, 2, 4]),
        ):
            qkv = torch.randn(len(positions), 64, generator=generator)
            if bounds[1] == 2:
                # The positions in the gaps were stored by another call.
                fill = torch.randn(4, 64, generator=generator)
                filler = (fill, int32([12, 14, 7, 8]), int32([0, 2, 2, 4]), int32([2, 1, 0]))
                function(*filler, table, pool.kv_pool, int32([1]), **heads, **place)
            operands = (qkv, int32(positions), int32(bounds), int32([2, 1, 0]), table)
            outputs.append(function(*operands, pool.kv_pool, int32([1]), **heads, **place))
        pool.assert_guards_intact()
        results.append((torch.cat(outputs), pool.units.nan_to_num(7.0)))
    torch.testing.assert_close(*(result[0] for result in results), rtol=1e-5, atol=1e-6)
    assert torch.equal(results[0][1], results[1][1])


# ---- what follows


def test_a_model_calls_torchs_operators_where_it_was_told_and_ours_elsewhere() -> None:
    one, other = Operators(["fenced_silu_mul"]), Operators()
    assert one.fenced_silu_mul is reference.fenced_silu_mul
    assert one.fenced_rope is torch.ops.looptrt.fenced_rope
    assert one.unfused == {"fenced_silu_mul"}
    for op in schema.OPS:
        assert getattr(other, op.name) is getattr(torch.ops.looptrt, op.name)
        assert getattr(Operators(launch.OPERATORS), op.name) is unfused.FORMS[op.name]
    with pytest.raises(PluginError, match="there is no operator rope, silu"):
        Operators(["silu", "rope", "fenced_rope"])


def test_verdicts_come_back_for_the_same_question_only(tmp_path: Path) -> None:
    verdicts = [*probed(SPECS["huginn"]).values()]
    verdicts[0].refused("case", PluginError("no"))
    cache = VerdictCache(tmp_path / "cache", {"driver": "1", "rows": [1, 2]})
    assert cache.load() is None
    cache.keep(verdicts)
    assert cache.load() == verdicts
    assert not list(failures(cache.load() or []))[1:]
    assert VerdictCache(tmp_path / "cache", {"driver": "2", "rows": [1, 2]}).load() is None
    assert [path.suffix for path in cache.path.parent.iterdir()] == [".json"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"question": 1}', "cut", "other"])
def test_a_damaged_cache_counts_as_absent(tmp_path: Path, damage: str) -> None:
    cache = VerdictCache(tmp_path, {"driver": "1"})
    cache.keep([*probed(SPECS["ouro"]).values()])
    text = cache.path.read_text()
    if damage == "cut":
        damage = text[: len(text) // 2]
    elif damage == "other":
        damage = json.dumps({**json.loads(text), "question": {"driver": "2"}})
    cache.path.write_text(damage)
    assert cache.load() is None


def test_a_folder_that_takes_no_files_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    VerdictCache(blocked / "cache", {}).keep([])
    assert "kernel verdicts are not kept" in caplog.text
