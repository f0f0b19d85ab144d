"""Tokenizer and chat template: what the runtime could not load is refused by the build.

Each bad file is tried on both sides: the builder names it while planning, the runtime while
loading, should it come into an engine directory in another way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from looptrt.builder.build import build, plan_build
from looptrt.builder.build_config import BuildConfig
from looptrt.builder.source import open_checkpoint
from looptrt.builder.tokens import tokenizer_files
from looptrt.errors import CheckpointError, ManifestError, RequestError
from looptrt.manifest import Manifest
from looptrt.models import registry
from looptrt.runtime.chat import ChatTemplate
from looptrt.runtime.tokenizer import Tokenizer
from tests.support.checkpoints import tiny_huginn, tiny_ouro, write_tokenizer

USER = {"role": "user", "content": "Hello"}
CONFIG, TEMPLATE, TOKENIZER = "tokenizer_config.json", "chat_template.jinja", "tokenizer.json"


def template(value: object) -> str:
    return json.dumps({"chat_template": value})


DEEP = "{{ " + "(" * 5000 + ")" * 5000 + " }}"
BLOCKS = "{% for a in b %}" * 30 + "{% endfor %}" * 30
BAD_TEMPLATES = {
    "config is no JSON": (CONFIG, "{"),
    "config is no object": (CONFIG, "[]"),
    "config is too deep": (CONFIG, '{"a": ' + "[" * 100_000),
    "config has a key twice": (CONFIG, '{"bos_token": "a", "bos_token": "b"}'),
    "config has a long number": (CONFIG, '{"a": ' + "9" * 5000 + "}"),
    "config is not UTF-8": (CONFIG, b'{"a": "\xff"}'),
    "token is a number": (CONFIG, '{"bos_token": 3}'),
    "token has no content": (CONFIG, '{"bos_token": {}}'),
    "template is a number": (CONFIG, template(3)),
    "template is an object": (CONFIG, template({"default": "x"})),
    "entry is a string": (CONFIG, template(["x"])),
    "entry has no name": (CONFIG, template([{"template": "x"}])),
    "entry has no template": (CONFIG, template([{"name": "default"}])),
    "entry's name is a list": (CONFIG, template([{"name": [], "template": "x"}])),
    "template of config has bad syntax": (CONFIG, template("{% if %}")),
    "bad syntax": (TEMPLATE, "{% if %}"),
    "unknown filter": (TEMPLATE, "{{ 1 | no_such_filter }}"),
    "nested too deeply": (TEMPLATE, DEEP),
    "too many blocks for Python": (TEMPLATE, BLOCKS),
    "not UTF-8": (TEMPLATE, b"\xff"),
}


def put(directory: Path, name: str, content: str | bytes) -> None:
    (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("bad", BAD_TEMPLATES)
def test_unusable_template(tmp_path: Path, bad: str) -> None:
    name, content = BAD_TEMPLATES[bad]
    checkpoint = tiny_ouro(tmp_path / "c")
    put(checkpoint, name, content)
    with pytest.raises(CheckpointError, match=f"{name}: "):
        plan_build(BuildConfig(checkpoint, tmp_path / "e"))
    engine = tmp_path / "e"
    engine.mkdir()
    put(engine, name, content)
    with pytest.raises(ManifestError, match=f"{name}: "):
        ChatTemplate.of_engine(engine)


def no_unknown_token(path: Path) -> None:
    """A tokenizer that cannot encode what it has no token for."""
    content = json.loads(path.read_text())
    content["model"]["unk_token"] = "gone"
    path.write_text(json.dumps(content))


def panic(path: Path) -> None:
    """A template that names a token which it does not have: the library panics."""
    content = json.loads(path.read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }
    path.write_text(json.dumps(content))


BAD_TOKENIZERS: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda path: path.write_text("{"),
    "no tokenizer": lambda path: path.write_text("{}"),
    "too deep": lambda path: path.write_text("[" * 100_000),
    "cannot encode": no_unknown_token,
    "panics": panic,
}


@pytest.mark.parametrize("bad", BAD_TOKENIZERS)
def test_unusable_tokenizer(tmp_path: Path, bad: str) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    write_tokenizer(checkpoint, {})
    BAD_TOKENIZERS[bad](checkpoint / TOKENIZER)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a usable tokenizer"):
        plan_build(BuildConfig(checkpoint, tmp_path / "e"))
    with pytest.raises(ManifestError, match=r"tokenizer\.json: not a usable tokenizer"):
        Tokenizer(checkpoint / TOKENIZER)


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "directory": (Path.mkdir, "found a directory"),
    "pipe": (os.mkfifo, "found a pipe"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "found a device"),
    "broken link": (lambda path: path.symlink_to("nowhere"), "a link to a file that is missing"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [CONFIG, TEMPLATE, TOKENIZER, "generation_config.json"])
def test_something_else_in_place_of_a_file(tmp_path: Path, kind: str, name: str) -> None:
    make, words = KINDS[kind]
    checkpoint = tiny_ouro(tmp_path / "c")
    make(checkpoint / name)
    with pytest.raises(CheckpointError, match=f"{name}: .*{words}"):
        plan_build(BuildConfig(checkpoint, tmp_path / "e"))


# Rendering: a template is foreign code.


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.no_such() }}",
        "{{ none.x.y }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",  # RecursionError
        "{% for i in range(3) recursive %}{{ loop([i]) }}{% endfor %}",
        "{{ [].pop() }}",
        "{{ 'x' * (10 ** 14) }}",  # MemoryError
        "{{ '%d' | format('x') }}",
        "{{ cycler() }}",  # RuntimeError
    ],
)
def test_template_that_fails_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="messages: the chat template"):
        ChatTemplate(source, {}, "here").render([USER])


def test_deeply_nested_messages_are_a_request_error() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="messages"):
        ChatTemplate("x", {}, "here").render([{"role": "user", "content": deep}])  # type: ignore[dict-item]


# A family's template goes into the engine directory.


def engine_of(checkpoint: Path, target: Path) -> Path:
    build(BuildConfig(checkpoint, target))
    Manifest.load(target)
    return target


def rendered(engine: Path) -> str:
    """A prompt, by what lies in the directory alone."""
    found = ChatTemplate.of_engine(engine)
    assert found is not None
    return found.render([USER])


def test_ouro_template_is_built_in(tmp_path: Path) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    write_tokenizer(checkpoint, {"<|im_start|>": 1, "<|im_end|>": 2})
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(engine_of(checkpoint, tmp_path / "e")) == expected


@pytest.mark.parametrize("bos", [None, "<s>"])
def test_huginn_template_is_built_in_and_takes_the_begin_token_of_the_files(
    tmp_path: Path, bos: str | None
) -> None:
    checkpoint = tiny_huginn(tmp_path / "c")
    write_tokenizer(checkpoint, {})
    text = json.dumps({"bos_token": bos})
    (checkpoint / CONFIG).write_text(text)
    engine = engine_of(checkpoint, tmp_path / "e")
    assert rendered(engine).startswith((bos or "<|begin_text|>") + "<|begin_header|>user")
    assert (engine / CONFIG).read_text() == text


@pytest.mark.parametrize("name", [CONFIG, TEMPLATE])
def test_template_of_the_checkpoint_is_kept_as_it_is(tmp_path: Path, name: str) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    write_tokenizer(checkpoint, {})
    put(checkpoint, name, "own" if name == TEMPLATE else template("own"))
    engine = engine_of(checkpoint, tmp_path / "e")
    assert rendered(engine) == "own"
    assert (engine / TEMPLATE).exists() == (name == TEMPLATE)


def test_without_a_tokenizer_no_template_is_built_in(tmp_path: Path) -> None:
    engine = engine_of(tiny_ouro(tmp_path / "c"), tmp_path / "e")
    assert not (engine / TEMPLATE).exists()


FAMILY_FILE = """
from dataclasses import replace
from looptrt.models.ouro import FAMILY

NOVEL = replace(FAMILY, end_tokens=("<over>",), chat_template="{{ messages[0].content }}<go>")
BARE = replace(FAMILY, end_tokens=(), chat_template=None)
BROKEN = replace(FAMILY, chat_template="{% if %}")
"""


@pytest.fixture
def novel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildConfig:
    """A build with a family that this tree does not know."""
    monkeypatch.setattr(registry, "_from_files", {})
    (tmp_path / "novel.py").write_text(FAMILY_FILE)
    checkpoint = tiny_ouro(tmp_path / "c", eos_token_id=None)
    write_tokenizer(checkpoint, {"<over>": 7, "<|im_end|>": 2})
    return BuildConfig(
        checkpoint,
        tmp_path / "e",
        model_cls_file=tmp_path / "novel.py",
        model_cls_name="NOVEL",
    )


def test_family_out_of_the_tree_supplies_template_and_end_tokens(novel: BuildConfig) -> None:
    manifest = build(novel)
    assert manifest.tokens.eos == (7,)
    assert "tokenizer.json <over> 7" in manifest.tokens.source
    assert rendered(novel.output_dir) == "Hello<go>"


def test_family_without_template_and_end_tokens(novel: BuildConfig) -> None:
    plan = plan_build(replace(novel, model_cls_name="BARE"))
    assert plan.tokens.eos == ()
    assert TEMPLATE not in plan.text_files


def test_broken_template_of_a_family_is_named(novel: BuildConfig) -> None:
    with pytest.raises(CheckpointError, match="OuroForCausalLM: chat_template: not a usable"):
        plan_build(replace(novel, model_cls_name="BROKEN"))


def test_begin_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    checkpoint = tiny_ouro(tmp_path / "c", vocab_size=100, eos_token_id=None, pad_token_id=None)
    write_tokenizer(checkpoint, {"<s>": 200}, bos="<s>")
    with pytest.raises(CheckpointError, match=r"begin token: expected token ids from 0 to 99"):
        plan_build(BuildConfig(checkpoint, tmp_path / "e"))


def test_every_file_taken_over_is_listed(tmp_path: Path) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    write_tokenizer(checkpoint, {})
    put(checkpoint, "special_tokens_map.json", "{}")
    files = tokenizer_files(checkpoint, open_checkpoint(checkpoint).family)
    assert list(files) == [TOKENIZER, "special_tokens_map.json", TEMPLATE]
