"""A build that is refused names what is wrong and leaves nothing (A6, G1, G4, G5, G6)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from looptrt.builder.build import BuildConfig, BuildPlan, build, make_weights, plan_build
from looptrt.builder.source import open_config
from looptrt.errors import BuildError, CheckpointError, LooptrtError
from looptrt.models.blocks import EMBEDDING, HEAD
from tests.support.checkpoints import (
    Config,
    Tensors,
    huginn_config,
    huginn_tensors,
    ouro_config,
    ouro_tensors,
    tiny_huginn,
    tiny_ouro,
    trtllm_tensors,
    write_checkpoint,
    write_trtllm_checkpoint,
)

SHARD_1 = "model-00001-of-00002.safetensors"
SHARD_2 = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
UP = "model.layers.1.mlp.up_proj.weight"  # in shard 2
OURO_HEAD, OURO_EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
HUGINN_EMBEDDING = "transformer.wte.weight"


def refuse(checkpoint: Path, *words: str, error: type[LooptrtError] = CheckpointError) -> None:
    """A build fails with one error that has all the words, and writes nothing."""
    output = checkpoint.parent / "engine"
    before = sorted(checkpoint.parent.rglob("*"))
    with pytest.raises(error) as caught:
        build(BuildConfig(checkpoint, output))
    for word in words:
        assert word in str(caught.value)
    assert sorted(checkpoint.parent.rglob("*")) == before


def plan(checkpoint: Path, **flags: Any) -> BuildPlan:
    return plan_build(BuildConfig(checkpoint, checkpoint.parent / "engine", **flags))


def edit_tensors(path: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def put_nan(tensors: Tensors) -> None:
    tensors[UP][3, 5] = float("nan")


def widen(tensors: Tensors) -> None:
    tensors[UP] = torch.zeros(97, 64)


def cut(amount: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        content = (checkpoint / SHARD_1).read_bytes()
        (checkpoint / SHARD_1).write_bytes(content[: amount(len(content))])

    return damage


def remove_tensor(checkpoint: Path) -> None:
    edit_tensors(checkpoint / SHARD_2, lambda tensors: tensors.pop(UP))
    index = json.loads((checkpoint / INDEX).read_text())
    del index["weight_map"][UP]
    (checkpoint / INDEX).write_text(json.dumps(index))


def write_pointer(checkpoint: Path) -> None:
    (checkpoint / SHARD_2).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:a\n")


def lengthen_header(checkpoint: Path) -> None:
    content = (checkpoint / SHARD_2).read_bytes()
    (checkpoint / SHARD_2).write_bytes((10**12).to_bytes(8, "little") + content[8:])


def empty(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        path.unlink()


def pickle_only(checkpoint: Path) -> None:
    for name in (SHARD_1, SHARD_2, INDEX):
        (checkpoint / name).unlink()
    (checkpoint / "pytorch_model.bin").touch()


DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "shard 2 deleted": (lambda path: (path / SHARD_2).unlink(), (SHARD_2, "missing")),
    "one byte cut": (cut(lambda size: size - 1), (SHARD_1, "tensor", "is cut")),
    "half cut": (cut(lambda size: size // 2), (SHARD_1, "tensor", "is cut")),
    "LFS pointer": (write_pointer, (SHARD_2, "LFS pointer")),
    "empty directory": (empty, ("config.json", "no such file")),
    "header too long": (lengthen_header, (SHARD_2, "claims 1000000000000 bytes")),
    "index absent": (lambda path: (path / INDEX).unlink(), (SHARD_1, "without an index")),
    "tensor removed": (remove_tensor, (INDEX, UP, "missing", "[96, 64]")),
    "wrong shape": (
        lambda path: edit_tensors(path / SHARD_2, widen),
        (SHARD_2, UP, "expected shape [96, 64]", "found [97, 64]"),
    ),
    "NaN": (lambda path: edit_tensors(path / SHARD_2, put_nan), (SHARD_2, UP, "found nan")),
    "pickles only": (pickle_only, ("pytorch_model.bin", "pickles")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint(tmp_path: Path, damage: str) -> None:
    act, words = DAMAGES[damage]
    checkpoint = tiny_ouro(tmp_path / "checkpoint", shards=2)
    assert UP in load_file(checkpoint / SHARD_2)
    act(checkpoint)
    refuse(checkpoint, *words)


@pytest.mark.parametrize("loops", [0, -1, "3", 2.5, True, None, ...])
def test_unusable_loop_count_in_the_config(tmp_path: Path, loops: object) -> None:
    for number, (maker, key) in enumerate(
        [(tiny_ouro, "total_ut_steps"), (tiny_huginn, "mean_recurrence")]
    ):
        checkpoint = maker(tmp_path / str(number) / "checkpoint", **{key: loops})
        refuse(checkpoint, "config.json", key, "at least 1" if loops not in (None, ...) else "")


@pytest.mark.parametrize(("max_loops", "planes"), [(None, 4), (2, 2), (6, 6)])
def test_plan_holds_max_loops(
    tmp_path: Path, max_loops: int | None, planes: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = plan(tiny_ouro(tmp_path / "checkpoint"), max_loops=max_loops)
    assert made.layout.max_loops == made.layout.num_planes == planes
    assert made.spec.num_loops == 4
    assert ("more than the 4 loops" in caplog.text) == (planes > 4)


@pytest.mark.parametrize("architectures", [..., None, [], ["A", "B"], "OuroForCausalLM", [3]])
def test_unclear_architecture(tmp_path: Path, architectures: object) -> None:
    checkpoint = tiny_ouro(tmp_path / "checkpoint", architectures=architectures)
    refuse(checkpoint, "config.json", "architectures")


def test_unknown_architecture(tmp_path: Path) -> None:
    checkpoint = tiny_ouro(tmp_path / "checkpoint", architectures=["LlamaForCausalLM"])
    refuse(checkpoint, "config.json", "'LlamaForCausalLM' is unknown", "OuroForCausalLM")


# G4, G5 and G6 for both layouts of a checkpoint.


@dataclass(frozen=True)
class Layout:
    """One of the two: how it is written, and what some Ouro tensors are called in it."""

    write: Callable[..., Path]
    names: Callable[[Config, Tensors], Tensors]
    embedding: dict[str, str]
    up: str
    qkv: str


LAYOUTS = {
    "hf": Layout(
        write_checkpoint,
        lambda _, tensors: tensors,
        {"ouro": OURO_EMBEDDING, "huginn": HUGINN_EMBEDDING},
        UP,
        "self_attn.q_proj.weight",
    ),
    "trtllm": Layout(
        write_trtllm_checkpoint,
        trtllm_tensors,
        dict.fromkeys(("ouro", "huginn"), "transformer.vocab_embedding.weight"),
        "transformer.layers.1.mlp.gate.weight",
        "attention.qkv.weight",
    ),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


# G4: the head.

TIED_KEYS = {"ouro": "tie_word_embeddings", "huginn": "tie_embeddings"}
PARTS = {"ouro": (ouro_config, ouro_tensors), "huginn": (huginn_config, huginn_tensors)}


def write_with_head(directory: Path, layout: Layout, family: str, tied: bool, head: str) -> Path:
    """A checkpoint whose head is absent, an equal copy, different, or the only matrix."""
    make_config, make_tensors = PARTS[family]
    config = make_config(**{TIED_KEYS[family]: tied})
    tensors = make_tensors(config)
    tensors.pop("lm_head.weight", None)
    name = LAYOUTS["hf"].embedding[family]
    if head == "different":
        tensors["lm_head.weight"] = tensors[name] + 1
    elif head != "absent":
        tensors["lm_head.weight"] = tensors[name].clone()
    if head == "only":
        del tensors[name]
    return layout.write(directory, config, tensors)


@pytest.mark.parametrize("family", ["ouro", "huginn"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["absent", "equal", "different", "only"])
def test_the_files_decide_about_the_head(
    tmp_path: Path,
    layout: Layout,
    family: str,
    tied: bool,
    head: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = write_with_head(tmp_path / "checkpoint", layout, family, tied, head)
    embedding = layout.embedding[family]
    if not tied and head == "absent":
        refuse(checkpoint, "lm_head.weight", "missing", "does not tie it")
        return
    if not tied and head == "only":
        refuse(checkpoint, embedding, "missing")
        return
    made = plan(checkpoint)
    assert made.spec.tied_head == (head != "different")
    assert (HEAD in made.recipes) == (head == "different")
    assert made.recipes[EMBEDDING].sources == (embedding,)
    assert ("differs from" in caplog.text) == (tied and head == "different")


# G5: attention geometry.


@pytest.mark.parametrize("head_dim", [..., None, 16, 32])
@pytest.mark.parametrize("kv_heads", [..., None, 4, 2, 1])
def test_attention_geometry_that_fits(
    tmp_path: Path, layout: Layout, head_dim: object, kv_heads: object
) -> None:
    config = ouro_config(head_dim=head_dim, num_key_value_heads=kv_heads)
    made = plan(layout.write(tmp_path / "checkpoint", config, ouro_tensors(config)))
    expected_dim = 32 if head_dim == 32 else 16
    expected_kv = kv_heads if isinstance(kv_heads, int) else 4
    assert (made.spec.head_dim, made.spec.num_kv_heads) == (expected_dim, expected_kv)
    assert made.layout.head_dim == expected_dim


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"head_dim": ..., "num_attention_heads": 3}, "hidden_size"),
        ({"head_dim": 15}, "head_dim"),
    ],
)
def test_attention_geometry_that_does_not_fit(
    tmp_path: Path, layout: Layout, changes: dict[str, object], word: str
) -> None:
    sound = ouro_config()
    checkpoint = layout.write(tmp_path / "checkpoint", ouro_config(**changes), ouro_tensors(sound))
    refuse(checkpoint, "config.json", word)


def test_weights_are_checked_against_an_explicit_head_size(tmp_path: Path, layout: Layout) -> None:
    checkpoint = layout.write(
        tmp_path / "checkpoint", ouro_config(head_dim=32), ouro_tensors(ouro_config())
    )
    refuse(checkpoint, layout.qkv, "expected shape [", "64]", "found [")


@pytest.mark.parametrize("key", ["n_heads", "num_attention_heads"])
def test_huginn_heads_under_either_key(tmp_path: Path, layout: Layout, key: str) -> None:
    """Published files give 55 heads × 96 under one of two keys, and a wrong head_dim."""
    config = huginn_config(n_heads=55, num_attention_heads=55, num_key_value_heads=55, n_embd=5280)
    tensors = {"transformer.wte.weight": torch.zeros(1)}
    other = {"n_heads": "num_attention_heads", "num_attention_heads": "n_heads"}[key]
    del config[other]
    checkpoint = layout.write(tmp_path / "checkpoint", config | {"head_dim": 64}, tensors)
    spec = open_config(checkpoint / "config.json").spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (55, 55, 96)


# G6: dtypes, extra keys.


def converted(made: BuildPlan) -> Tensors:
    """The weights a plan writes."""
    path = made.config.output_dir.parent / "rank0.safetensors"
    make_weights(made, path)
    return load_file(path)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_cast_to_the_declared_dtype_is_logged_with_its_error(
    tmp_path: Path, layout: Layout, stored: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    config = ouro_config(torch_dtype="bfloat16")
    tensors = ouro_tensors(config, dtype=stored)
    built = converted(plan(layout.write(tmp_path / "checkpoint", config, tensors)))
    assert {tensor.dtype for tensor in built.values()} == {torch.bfloat16}
    for ours, theirs in ((EMBEDDING, OURO_EMBEDDING), (HEAD, OURO_HEAD)):
        assert torch.equal(built[ours], tensors[theirs].bfloat16())
    count = len(layout.names(config, tensors))
    assert caplog.text.count(f"cast {count} tensors from {stored} to torch.bfloat16") == 1
    assert "largest error 0.0" in caplog.text


def test_mixed_norms_are_cast_and_counted(
    tmp_path: Path, layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    config = ouro_config(torch_dtype="bfloat16")
    tensors = ouro_tensors(config, dtype=torch.bfloat16)
    norms = [name for name in tensors if "norm" in name]
    for name in norms:
        tensors[name] = tensors[name].float()
    built = converted(plan(layout.write(tmp_path / "checkpoint", config, tensors)))
    assert built["core.norm.weight"].dtype == torch.bfloat16
    assert f"cast {len(norms)} tensors from torch.float32" in caplog.text
    assert "largest error 0 in" in caplog.text


def test_value_beyond_the_dtype_is_refused(tmp_path: Path, layout: Layout) -> None:
    config = ouro_config()
    tensors: Tensors = ouro_tensors(config)
    tensors[UP] = tensors[UP].double()
    tensors[UP][0, 0] = 1e300
    checkpoint = layout.write(tmp_path / "checkpoint", config, tensors)
    refuse(checkpoint, layout.up, "beyond the range")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_known_extras_are_ignored_and_coarse_ones_reported(
    tmp_path: Path, layout: Layout, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    config = huginn_config()
    tensors = huginn_tensors(config)
    tensors["freqs_cis"] = tensors["freqs_cis"].to(dtype)
    with caplog.at_level(logging.INFO, "looptrt"):
        made = plan(layout.write(tmp_path / "checkpoint", config, tensors))
    (record,) = [item for item in caplog.records if "freqs_cis" in item.getMessage()]
    assert record.levelno == (logging.INFO if dtype == torch.float32 else logging.WARNING)
    assert made.weights.tensors["prelude.rope.cos"].dtype == torch.float32


def test_rotary_frequencies_of_an_ouro_file_are_ignored(tmp_path: Path, layout: Layout) -> None:
    config = ouro_config()
    tensors = ouro_tensors(config)
    tensors["model.rotary_emb.inv_freq"] = torch.ones(8)
    plan(layout.write(tmp_path / "checkpoint", config, tensors))


def test_unknown_tensor(tmp_path: Path, layout: Layout) -> None:
    config = ouro_config()
    tensors = ouro_tensors(config) | {"a.stray": torch.zeros(1)}
    refuse(layout.write(tmp_path / "checkpoint", config, tensors), "'a.stray'", "unknown")


def test_float16_is_refused_unless_another_dtype_is_chosen(tmp_path: Path, layout: Layout) -> None:
    config = huginn_config(torch_dtype="float16")
    tensors = huginn_tensors(config, dtype=torch.float16)
    checkpoint = layout.write(tmp_path / "checkpoint", config, tensors)
    refuse(checkpoint, "float16", "--dtype", error=BuildError)
    assert plan(checkpoint, dtype="bfloat16").dtype == "bfloat16"


def test_remote_code_of_a_checkpoint_is_not_run(tmp_path: Path, layout: Layout) -> None:
    config = ouro_config(auto_map={"AutoModel": "evil.Evil"})
    checkpoint = layout.write(tmp_path / "checkpoint", config, ouro_tensors(config))
    (checkpoint / "evil.py").write_text("raise SystemExit(9)")
    plan(checkpoint)
