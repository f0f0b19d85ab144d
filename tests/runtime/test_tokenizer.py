"""Prompts to token ids, and chat templates (case A1)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from looptrt.errors import ManifestError, RequestError
from looptrt.models.registry import family_of
from looptrt.runtime.chat import ChatTemplate
from looptrt.runtime.tokenizer import Tokenizer

WORDS = {"<unk>": 0, "<begin>": 1, "<end>": 2, "a": 3, "b": 4}


def tokenizer(tmp_path: Path, template: str | None) -> Tokenizer:
    raw = RawTokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(["<begin>", "<end>"])
    if template is not None:
        raw.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<begin>", 1), ("<end>", 2)]
        )
    raw.enable_truncation(2)
    raw.enable_padding(length=8)
    path = tmp_path / "tokenizer.json"
    raw.save(str(path))
    return Tokenizer(path)


def test_begin_token_stays_and_end_token_is_dropped(tmp_path: Path) -> None:
    huginn = tokenizer(tmp_path, "<begin> $A <end>")
    assert huginn.encode("ab") == [1, 3, 4]
    assert huginn.encode("") == [1]


def test_end_token_written_in_the_prompt_stays(tmp_path: Path) -> None:
    assert tokenizer(tmp_path, "<begin> $A <end>").encode("a<end>") == [1, 3, 2]
    assert tokenizer(tmp_path, "<begin> $A").encode("a<end>") == [1, 3, 2]


def test_tokenizer_that_adds_nothing_gives_an_empty_prompt_no_tokens(tmp_path: Path) -> None:
    assert tokenizer(tmp_path, None).encode("") == []


def test_settings_of_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    assert tokenizer(tmp_path, None).encode("ababab") == [3, 4, 3, 4, 3, 4]


def test_rendered_template_gets_no_second_begin_token(tmp_path: Path) -> None:
    huginn = tokenizer(tmp_path, "<begin> $A <end>")
    assert huginn.encode("<begin>a", add_special_tokens=False) == [1, 3]


def test_lone_surrogate_is_a_request_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="prompt: not valid Unicode"):
        tokenizer(tmp_path, None).encode("\ud800")


def test_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ManifestError, match=r"tokenizer\.json"):
        Tokenizer(path)


def test_directory_without_the_file_has_no_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.of_engine(tmp_path) is None


# ---- chat templates

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": " Hello "}
ASSISTANT = {"role": "assistant", "content": "Hi."}


def family_template(directory: Path, architecture: str) -> ChatTemplate:
    """A family's template, read from where the builder puts it."""
    source = family_of(architecture).chat_template
    assert source is not None
    (directory / "chat_template.jinja").write_text(source)
    template = ChatTemplate.of_engine(directory)
    assert template is not None
    return template


@pytest.fixture
def ouro(tmp_path: Path) -> ChatTemplate:
    return family_template(tmp_path, "OuroForCausalLM")


@pytest.fixture
def huginn(tmp_path: Path) -> ChatTemplate:
    return family_template(tmp_path, "RavenForCausalLM")


@pytest.mark.parametrize(
    ("enable_thinking", "end"),
    [
        (True, "<|im_start|>assistant\n<think>\n"),
        (False, "<|im_start|>assistant\n"),
        (None, "<|im_start|>assistant\n"),
    ],
)
def test_ouro_template(ouro: ChatTemplate, enable_thinking: bool | None, end: str) -> None:
    assert ouro.render([SYSTEM, USER], enable_thinking=enable_thinking) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hello <|im_end|>\n" + end
    )


def test_ouro_keeps_a_second_system_message_and_does_not_double_the_first(
    ouro: ChatTemplate,
) -> None:
    again = {"role": "system", "content": "Be kind."}
    text = ouro.render([SYSTEM, USER, again, USER])
    assert text.count("Be brief.") == text.count("Be kind.") == 1
    assert text.count("<|im_start|>system\n") == 2


def test_ouro_template_without_a_generation_prompt(ouro: ChatTemplate) -> None:
    text = ouro.render([USER, ASSISTANT], add_generation_prompt=False, enable_thinking=True)
    assert text.endswith("<|im_start|>assistant\nHi.<|im_end|>\n")


def test_huginn_template(huginn: ChatTemplate) -> None:
    assert huginn.render([SYSTEM, USER, ASSISTANT, USER]) == (
        "<|begin_text|>"
        "<|begin_header|>system<|end_header|>\n\nBe brief.<|end_turn|>"
        "<|begin_header|>user<|end_header|>\n\nHello<|end_turn|>"
        "<|begin_header|>Huginn<|end_header|>\n\nHi.<|end_turn|>"
        "<|begin_header|>user<|end_header|>\n\nHello<|end_turn|>"
        "<|begin_header|>Huginn<|end_header|>\n\n"
    )


def test_huginn_template_without_a_generation_prompt(huginn: ChatTemplate) -> None:
    text = huginn.render([USER], add_generation_prompt=False)
    assert text.endswith("Hello<|end_turn|><|end_text|>")


def test_template_file_goes_before_the_tokenizer_s_config(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}config"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.of_engine(tmp_path)
    assert template is not None
    assert template.render([USER]) == "<s>config"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file")
    template = ChatTemplate.of_engine(tmp_path)
    assert template is not None
    assert template.render([USER]) == "<s>file"


def test_named_templates_use_the_default(tmp_path: Path) -> None:
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.of_engine(tmp_path)
    assert template is not None
    assert template.render([USER]) == "d"


def test_directory_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.of_engine(tmp_path) is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system message') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ missing.attribute }}",
        "{{ 1 // 0 }}",
        "{{ messages['x'] + 1 }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_template_that_fails_or_escapes_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="messages: the chat template"):
        ChatTemplate(source, {}, "here").render([USER])


def test_template_with_a_syntax_error_is_named() -> None:
    with pytest.raises(ManifestError, match="here: not a usable chat template"):
        ChatTemplate("{% if %}", {}, "here")


@pytest.mark.parametrize(
    "messages",
    [[], "hello", None, ["hello"], [{"role": "user"}], [{"role": "user", "content": 1}], [{}]],
)
def test_malformed_messages_are_a_request_error(ouro: ChatTemplate, messages: object) -> None:
    with pytest.raises(RequestError, match="messages"):
        ouro.render(messages)  # type: ignore[arg-type]


def test_unset_thinking_is_undefined_in_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking is defined }}", {}, "here")
    assert template.render([USER]) == "False"
    assert template.render([USER], enable_thinking=False) == "True"


def test_thinking_that_a_template_does_not_know_is_refused() -> None:
    template = ChatTemplate("{{ messages[0].content }} enable_thinking", {}, "here")
    assert template.render([USER]).endswith("enable_thinking")
    for value in (True, False):
        with pytest.raises(RequestError, match=r"enable_thinking: the chat template \(here\)"):
            template.render([USER], enable_thinking=value)
