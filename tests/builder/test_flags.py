"""Flags: TensorRT-LLM's names, one line and exit code 2 for what cannot be served."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from looptrt.builder.build import BuildConfig
from looptrt.builder.flag_docs import document
from looptrt.builder.flag_table import FLAGS, GROUPS, Flag, Form
from looptrt.builder.flags import read_command
from looptrt.cli import main as looptrt
from looptrt.cli import trtllm_build as main
from looptrt.errors import BuildError
from looptrt.loop_spec import NoiseMode
from looptrt.manifest import Manifest
from tests.support.checkpoints import tiny_huginn, tiny_ouro


def parse(*argv: str) -> BuildConfig:
    return read_command(["--checkpoint_dir", "c", *argv], "trtllm-build").config


def test_defaults() -> None:
    assert parse() == BuildConfig(Path("c"), Path("engine_outputs"))


def test_both_spellings_of_every_flag() -> None:
    values = {
        "--output_dir": "o",
        "--max_batch_size": "3",
        "--max_input_len": "4",
        "--max_seq_len": "5",
        "--max_num_tokens": "6",
        "--tokens_per_block": "7",
        "--max_loops": "8",
        "--workers": "9",
        "--kv_cache_type": "PAGED",
        "--logits_dtype": "bfloat16",
        "--backend": "pytorch",
        "--kv_planes": "compress-s8",
        "--noise": "sequential",
        "--dtype": "bfloat16",
        "--log_level": "verbose",
    }
    apart = [word for item in values.items() for word in item]
    joined = [f"{name}={value}" for name, value in values.items()]
    expected = BuildConfig(
        checkpoint_dir=Path("c"),
        output_dir=Path("o"),
        max_batch_size=3,
        max_input_len=4,
        max_seq_len=5,
        max_num_tokens=6,
        tokens_per_block=7,
        max_loops=8,
        kv_planes="compress-s8",
        noise=NoiseMode.SEQUENTIAL,
        dtype="bfloat16",
        logits_dtype="bfloat16",
        backend="pytorch",
        workers=9,
    )
    assert parse(*apart) == parse(*joined) == expected


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gemm_plugin", "float16"], "--gemm_plugin float16: looptrt chooses what runs"),
        (["--max_beam_width=4"], "--max_beam_width 4: beam search is not supported; accepted: 1"),
        (["--weight_streaming"], "--weight_streaming: weights stay in GPU memory"),
        (["--profiling_verbosity", "all"], "all: expected one of layer_names_only, detailed, none"),
        (["--compile_timeout", "0"], "--compile_timeout 0: expected seconds"),
        (["--compile_timeout", "nan"], "--compile_timeout nan: expected seconds"),
        (["--lora_dir", "a", "b"], "--lora_dir: LoRA is not supported"),
        (["--no_such_flag"], "--no_such_flag: unknown flag"),
        (["--max_batch", "3"], "--max_batch: unknown flag"),
        (["stray"], "stray: unknown flag"),
        (["--opt_batch_size", "8"], "--opt_batch_size: unknown flag"),
        (["--kv_cache_type", "continuous"], "continuous: expected paged, as the KV"),
        (["--kv_cache_type=disabled"], "disabled: expected paged, as every loop"),
        (["--kv_cache_type=odd"], "--kv_cache_type odd: expected paged"),
        (["--max_loops", "3.5"], "--max_loops 3.5: expected an integer"),
        (["--max_loops"], "--max_loops: expected one argument"),
        (["--noise", "loud"], "--noise loud: expected one of position, sequential"),
        (["--log_level", "loud"], "--log_level loud: expected one of internal_error"),
    ],
)
def test_flags_that_cannot_be_read(argv: list[str], words: str) -> None:
    with pytest.raises(BuildError) as caught:
        parse(*argv)
    assert words in str(caught.value)


def test_a_checkpoint_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--checkpoint_dir or --model_config: one of them" in capsys.readouterr().err


# The table.


def usable_word(flag: Flag) -> str | None:
    """TensorRT-LLM's default as a word for a command line, None for a switch or no default."""
    return None if flag.form in (Form.SWITCH, Form.LIST) else flag.default


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if flag.form != Form.NONE])
def test_every_flag_takes_its_default_and_refuses_with_a_reason(name: str) -> None:
    flag = FLAGS[name]
    word = usable_word(flag)
    for spelling in (name, *flag.aliases):
        if word is not None:
            parse(f"--{spelling}={word}")
        if flag.read is None:
            odd = [] if flag.form is Form.SWITCH else ["an_odd_value"]
            with pytest.raises(BuildError, match=f"--{name}.*: [a-zA-Z]"):
                parse(f"--{spelling}", *odd)
    assert flag.verdict == "acts" or flag.note


ISSUE = """build_config input_timing_cache output_timing_cache opt_num_tokens max_beam_width
gather_context_logits gather_generation_logits gather_all_token_logits gemm_plugin
gpt_attention_plugin remove_input_padding context_fmha use_paged_context_fmha multiple_profiles
reduce_fusion streamingllm paged_state profiling_verbosity strip_plan weight_sparsity
weight_streaming fast_build monitor_memory enable_debug_output visualize_network lora_dir
lora_ckpt_source lora_target_modules max_lora_rank lora_plugin max_prompt_embedding_table_size
speculative_decoding_mode max_draft_len max_encoder_input_len auto_parallel kv_cache_type
cluster_key gpus_per_node workers log_level model_config model_cls_file model_cls_name dtype"""


def test_the_table_has_every_flag_that_was_promised() -> None:
    assert not set(ISSUE.split()) - FLAGS.keys()
    assert len(FLAGS) == sum(map(len, GROUPS.values()))


def test_defaults_of_the_table_are_those_of_a_build() -> None:
    limited = ("max_input_len",)  # 1024, or less where the model has fewer positions
    for field in dataclasses.fields(BuildConfig):
        flag = FLAGS[field.name]
        default = flag.here or flag.default
        assert flag.read is not None
        if default is not None and field.default is not dataclasses.MISSING:
            expected = None if field.name in limited else flag.read(default)
            assert field.default == expected


def test_the_page_on_flags_is_written_from_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "trtllm_build.md"
    assert page.read_text(encoding="utf-8") == document(), (
        "run `python -m looptrt.builder.flag_docs > docs/trtllm_build.md`"
    )


@pytest.mark.parametrize("word", ["enable", "True", "true"])
def test_booleans_in_every_form(word: str) -> None:
    parse("--context_fmha", word, "--remove_input_padding", word, "--paged_kv_cache", word)
    with pytest.raises(BuildError, match="--streamingllm"):
        parse("--streamingllm", word)


@pytest.mark.parametrize(
    ("word", "works"), [("auto", True), ("float32", True), ("bfloat16", False)]
)
def test_attention_plugin_takes_the_engines_dtype(
    tmp_path: Path, word: str, works: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--checkpoint_dir", str(tiny_ouro(tmp_path / "c")), "--dry_run"]
    assert main([*argv, "--gpt_attention_plugin", word]) == (0 if works else 2)
    assert ("runs in the engine's dtype, float32" in capsys.readouterr().err) != works


# --build_config

# What TensorRT-LLM's own to_dict gives: every key at its default.
BUILD_CONFIG = {
    "max_input_len": 1024,
    "max_seq_len": None,
    "opt_batch_size": 8,
    "max_batch_size": 2048,
    "max_beam_width": 1,
    "max_num_tokens": 8192,
    "opt_num_tokens": None,
    "max_prompt_embedding_table_size": 0,
    "kv_cache_type": "PAGED",
    "gather_context_logits": 0,
    "gather_generation_logits": False,
    "strongly_typed": True,
    "force_num_profiles": None,
    "profiling_verbosity": "layer_names_only",
    "enable_debug_output": False,
    "max_draft_len": 0,
    "speculative_decoding_mode": 1,
    "use_refit": False,
    "input_timing_cache": None,
    "output_timing_cache": "model.cache",
    "lora_config": {"lora_dir": [], "lora_ckpt_source": "hf", "max_lora_rank": 64},
    "weight_sparsity": False,
    "weight_streaming": False,
    "use_strip_plan": False,
    "max_encoder_input_len": 1024,
    "dry_run": False,
    "visualize_network": None,
    "monitor_memory": False,
    "use_mrope": False,
    "plugin_config": {
        "dtype": "float16",
        "bert_attention_plugin": "auto",
        "gpt_attention_plugin": "auto",
        "gemm_plugin": None,
        "nccl_plugin": None,
        "lora_plugin": None,
        "smooth_quant_plugins": True,
        "context_fmha": True,
        "paged_kv_cache": None,
        "remove_input_padding": "enable",
        "use_fp8_context_fmha": True,
        "tokens_per_block": 32,
        "multiple_profiles": False,
        "manage_weights": False,
    },
}


def write_json(path: Path, content: object) -> str:
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_build_config_acts_and_flags_override_it(tmp_path: Path) -> None:
    content = BUILD_CONFIG | {"max_seq_len": 99, "max_num_tokens": 50, "max_beam_width": 4}
    file = write_json(tmp_path / "b.json", content)
    config = parse("--build_config", file, "--max_num_tokens", "60", "--max_beam_width", "1")
    assert (config.max_batch_size, config.max_seq_len, config.max_input_len) == (2048, 99, 1024)
    assert config.max_num_tokens == 60
    assert config.tokens_per_block == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_beam_width": 2}, "--max_beam_width 2: beam search"),
        ({"max_batch_size": "many"}, "--max_batch_size many: expected an integer"),
        ({"max_batch_size": True}, "--max_batch_size enable: expected an integer"),
        ({"max_batch_size": [1]}, "max_batch_size: expected a word"),
        ({"weight_streaming": True}, "--weight_streaming: weights stay"),
        ({"opt_batch_size": "few"}, "--opt_batch_size few: expected an integer"),
        ({"max_output_len": 9}, "build_config: unknown key 'max_output_len'"),
        ({"checkpoint_dir": "c"}, "build_config: unknown key 'checkpoint_dir'"),
        ({"plugin_config": {"gemm_plugin": "fp8"}}, "--gemm_plugin fp8: looptrt chooses"),
        ({"plugin_config": {"moe": True}}, "plugin_config: unknown key 'moe'"),
        ({"plugin_config": {"context_fmha": None}}, "--context_fmha disable"),
        ({"plugin_config": {"paged_kv_cache": False}}, "--paged_kv_cache disable"),
        ({"plugin_config": [1]}, "plugin_config: expected an object"),
        ({"lora_config": {"lora_dir": ["a"]}}, "lora_config: lora_dir: LoRA is not supported"),
        ({"lora_config": {"rank": 3}}, "lora_config: unknown key 'rank'"),
    ],
)
def test_build_config_that_cannot_be_served(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    file = write_json(tmp_path / "b.json", BUILD_CONFIG | change)
    with pytest.raises(BuildError) as caught:
        parse("--build_config", file)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\xff"])
def test_build_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "b.json").write_bytes(text.encode("latin-1"))
    for name in ("b.json", "absent.json"):
        with pytest.raises(BuildError, match=r"--build_config .*json: "):
            parse("--build_config", str(tmp_path / name))


# Whole builds.

FAMILY_FILE = """
from dataclasses import replace
from looptrt.models.ouro import FAMILY

def parse(config, where):
    return replace(FAMILY.parse_config(config, where), architecture="NovelForCausalLM")

NOVEL = replace(FAMILY, architecture="NovelForCausalLM", parse_config=parse)
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_family_from_a_file(tmp_path: Path, workers: str) -> None:
    (tmp_path / "novel.py").write_text(FAMILY_FILE)
    checkpoint = tiny_ouro(tmp_path / "c", architectures=["NovelForCausalLM"])
    argv = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "engine")]
    named = ["--model_cls_file", str(tmp_path / "novel.py"), "--model_cls_name", "NOVEL"]
    assert main([*argv, *named, "--workers", workers]) == 0
    assert Manifest.load(tmp_path / "engine").spec.architecture == "NovelForCausalLM"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--model_cls_file", "novel.py"], "name the family in it with --model_cls_name"),
        (["--model_cls_name", "NOVEL"], "say which file has it with --model_cls_file"),
        (["--model_cls_file", "absent.py", "--model_cls_name", "NOVEL"], "absent.py"),
        (["--model_cls_file", "novel.py", "--model_cls_name", "OTHER"], "OTHER"),
        (["--model_cls_file", "novel.py", "--model_cls_name", "NOVEL"], "NovelForCausalLM"),
    ],
)
def test_family_files_that_cannot_be_used(
    tmp_path: Path,
    given: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("novel.py").write_text(FAMILY_FILE)
    tiny_ouro(tmp_path / "c")
    assert main(["--checkpoint_dir", "c", *given]) == 2
    assert words in capsys.readouterr().err


def test_monitor_memory_logs_the_peak(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    argv = ["--checkpoint_dir", str(tiny_ouro(tmp_path / "c")), "--dry_run", "--monitor_memory"]
    assert main(argv) == 0
    (record,) = [item for item in caplog.records if "peak memory" in item.getMessage()]
    assert int(record.getMessage().split()[-2]) > 10


def test_config_alone_builds_on_the_command_line(tmp_path: Path) -> None:
    config = tiny_ouro(tmp_path / "c") / "config.json"
    argv = ["--model_config", str(config), "--output_dir", str(tmp_path / "engine")]
    assert main(argv) == 0
    flags = Manifest.load(tmp_path / "engine").build_flags
    assert flags["weights"] == "random, seed 0"


# Limits.

COUNTS = (
    "max_batch_size",
    "max_input_len",
    "max_seq_len",
    "max_num_tokens",
    "tokens_per_block",
    "opt_num_tokens",
    "max_loops",
    "workers",
)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        *(
            (f"--{name} {value}", f"--{name}: expected at least 1")
            for name in COUNTS
            for value in (0, -1)
        ),
        ("--max_seq_len 129", "--max_seq_len 129: the model defines 128 positions"),
        ("--max_seq_len 64 --max_input_len 65", "--max_input_len 65: expected at most"),
        ("--dtype float16", "--dtype float16: expected float32 or bfloat16"),
        ("--logits_dtype float16", "--logits_dtype float16"),
        ("--backend cuda", "--backend cuda: expected auto, pytorch, tensorrt, tensorrt_rtx"),
        ("--strip_plan", "--strip_plan: belongs to a TensorRT engine; say --backend tensorrt or"),
        ("--input_timing_cache c", "--input_timing_cache: belongs to a TensorRT engine"),
        ("--opt_num_tokens 9 --backend auto", "--opt_num_tokens: belongs to a TensorRT engine"),
        ("--kv_planes full", "unknown strategy 'full'"),
        ("--kv_planes compress-s4", "multiple of the core's 3 layers"),
        ("--kv_planes compress-s0", "compress-s0"),
        ("--noise sequential", "--noise sequential: OuroForCausalLM has no random initial state"),
    ],
)
def test_limits_that_the_model_cannot_meet(
    tmp_path: Path, argv: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    output = tmp_path / "engine"
    argv = f"--checkpoint_dir {checkpoint} --output_dir {output} {argv}"
    assert main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trtllm-build: error: ")
    assert err.count("\n") == 1
    assert words in err
    assert not output.exists()


def test_max_input_len_defaults_to_what_the_model_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--checkpoint_dir", str(tiny_ouro(tmp_path / "c")), "--dry_run"]
    assert main([*argv, "--max_seq_len", "100"]) == 0
    assert "prompt 100, sequence 100" in capsys.readouterr().out


def test_dry_run_prints_the_plan_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny_huginn(tmp_path / "c")
    before = sorted(tmp_path.rglob("*"))
    argv = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(tmp_path / "a" / "b")]
    assert main([*argv, "--dry_run", "--kv_planes", "compress-s8"]) == 0
    out = capsys.readouterr().out
    for fact in ("RavenForCausalLM", "2 prelude, 4 core, 2 coda", "2 (compress-s8)", "float32"):
        assert fact in out
    assert sorted(tmp_path.rglob("*")) == before


def test_dry_run_checks_the_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tiny_ouro(tmp_path / "c")
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["--checkpoint_dir", str(checkpoint), "--dry_run"]) == 2
    assert "is cut" in capsys.readouterr().err


def test_output_directory_of_someone_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(tiny_ouro(tmp_path / "c"))
    assert looptrt(["build", "--checkpoint_dir", checkpoint, "--output_dir", checkpoint]) == 2
    assert capsys.readouterr().err.startswith("looptrt build: error: --output_dir")
