"""The templates hold what the table of tensors says, and the table what TensorRT-LLM had."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from looptrt.runtime.triton import tensors
from looptrt.runtime.triton.repository import templates_dir
from looptrt.runtime.triton.settings import ENGINE_FIELDS
from looptrt.runtime.triton.tensors import MODELS, Tensor

# What issue 4 promises of `tensorrt_llm`, typed from there and not from the table.
_PROMISED_INPUTS = {
    "INT32[-1]": "input_ids",
    "INT32[1]": "input_lengths request_output_len end_id pad_id beam_width num_return_sequences "
    "runtime_top_k min_tokens",
    "FP32[1]": "runtime_top_p runtime_top_p_min runtime_top_p_decay temperature len_penalty "
    "repetition_penalty presence_penalty frequency_penalty",
    "UINT64[1]": "seed",
    "BOOL[1]": "streaming stop exclude_input_in_output return_log_probs return_context_logits "
    "return_generation_logits return_perf_metrics return_num_input_tokens "
    "return_num_output_tokens",
    "INT32[2,-1]": "stop_words_list bad_words_list",
    "FP32[-1]": "embedding_bias",
}
_PROMISED_OUTPUTS = {
    "INT32[-1,-1]": "output_ids",
    "INT32[-1]": "sequence_length",
    "FP32[-1]": "cum_log_probs",
    "FP32[-1,-1]": "output_log_probs context_logits",
    "FP32[-1,-1,-1]": "generation_logits",
    "INT32[1]": "sequence_index num_input_tokens num_output_tokens kv_cache_alloc_new_blocks "
    "kv_cache_reused_blocks kv_cache_alloc_total_blocks",
    "INT64[1]": "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns",
}


def config_of(name: str) -> model_config_pb2.ModelConfig:
    """A template with its fields filled by numbers or true, whichever parses."""
    text = (templates_dir() / name / "config.pbtxt").read_text("utf-8")
    fields = dict.fromkeys(Template(text).get_identifiers(), "1")
    fields |= {"decoupled_mode": "true"}
    return text_format.Parse(Template(text).substitute(fields), model_config_pb2.ModelConfig())


def shown(tensor: Tensor) -> str:
    return f"{tensor.dtype}[{','.join(map(str, tensor.dims))}]"


@pytest.mark.parametrize("name", MODELS)
def test_template_declares_the_tensors_of_the_table(name: str) -> None:
    config = config_of(name)
    types = model_config_pb2.DataType
    assert config.name == name
    for declared, expected in (
        (config.input, MODELS[name].inputs),
        (config.output, MODELS[name].outputs),
    ):
        assert [(one.name, types.Name(one.data_type), tuple(one.dims)) for one in declared] == [
            (one.name, f"TYPE_{one.dtype}".replace("BYTES", "STRING"), one.dims) for one in expected
        ]
    assert [one.optional for one in config.input] == [one.optional for one in MODELS[name].inputs]


@pytest.mark.parametrize(
    ("promised", "has"),
    [
        (_PROMISED_INPUTS, tensors.TENSORRT_LLM.inputs),
        (_PROMISED_OUTPUTS, tensors.TENSORRT_LLM.outputs),
    ],
)
def test_tensorrt_llm_has_every_tensor_of_tensorrt_llm_clients(
    promised: dict[str, str], has: tuple[Tensor, ...]
) -> None:
    by_name = {tensor.name: shown(tensor) for tensor in has}
    for kind, names in promised.items():
        for name in names.split():
            assert by_name[name] == kind, name


def test_names_are_unique_and_ours_are_marked_in_every_model() -> None:
    for name, model in MODELS.items():
        for side in (model.inputs, model.outputs):
            assert len({tensor.name for tensor in side}) == len(side), name
    ours = {tensor.name for tensor in tensors.TENSORRT_LLM.inputs if tensor.is_ours}
    assert {"loops", "prefill_loops", "exit_threshold", "cache_salt", "priority"} <= ours
    outputs = {tensor.name for tensor in tensors.ENSEMBLE.outputs if tensor.is_ours}
    assert outputs == {"finish_reason", "stop_reason", "loops_used", "num_cached_tokens"}


def test_text_models_take_the_same_tensors() -> None:
    draft = {"num_draft_tokens", "use_draft_logits"}
    bls = [one for one in tensors.TENSORRT_LLM_BLS.inputs if one.name not in draft]
    assert bls == [*tensors.ENSEMBLE.inputs]
    assert tensors.TENSORRT_LLM_BLS.outputs == tensors.ENSEMBLE.outputs


def test_ensemble_hands_every_tensor_on_as_the_table_says() -> None:
    steps = {step.model_name: step for step in config_of("ensemble").ensemble_scheduling.step}
    assert [*steps] == ["preprocessing", "tensorrt_llm", "postprocessing"]
    to_first = {value: key for key, value in steps["preprocessing"].input_map.items()}
    assert to_first == tensors.TO_PREPROCESSING
    engine = {value: key for key, value in steps["tensorrt_llm"].input_map.items()}
    from_first = {f"_{key}": value for key, value in tensors.FROM_PREPROCESSING.items()}
    assert engine == {**tensors.TO_TENSORRT_LLM, **from_first}
    taken = {*tensors.TO_PREPROCESSING, *tensors.TO_TENSORRT_LLM}
    assert taken == {tensor.name for tensor in tensors.ENSEMBLE.inputs}
    given = {
        *steps["tensorrt_llm"].output_map.values(),
        *steps["postprocessing"].output_map.values(),
    }
    assert {tensor.name for tensor in tensors.ENSEMBLE.outputs} <= given


def test_mapped_tensors_have_equal_types_and_shapes_on_both_sides() -> None:
    def same(one: Tensor, other: Tensor) -> None:
        assert shown(one) == shown(other), (one.name, other.name)

    models = tensors
    for own, name in models.TO_PREPROCESSING.items():
        same(models.ENSEMBLE.input(own), models.PREPROCESSING.input(name))
    for own, name in models.TO_TENSORRT_LLM.items():
        same(models.ENSEMBLE.input(own), models.TENSORRT_LLM.input(name))
    for own, name in models.TO_POSTPROCESSING.items():
        same(models.TENSORRT_LLM.output(own), models.POSTPROCESSING.input(name))
    for name in models.SHARED_OUTPUTS:
        same(models.TENSORRT_LLM.output(name), models.ENSEMBLE.output(name))
    for own, name in models.FROM_PREPROCESSING.items():
        target, source = models.TENSORRT_LLM.input(name), models.PREPROCESSING.output(own)
        assert (target.dtype, len(target.dims)) == (source.dtype, len(source.dims)), name


def test_every_setting_of_the_engine_has_a_parameter() -> None:
    assert set(ENGINE_FIELDS) <= set(config_of("tensorrt_llm").parameters)


def test_stream_order_and_cancellation_rest_on_one_unbatched_postprocessor() -> None:
    config = config_of("postprocessing")
    assert not config.HasField("dynamic_batching")
    assert [group.count for group in config.instance_group] == [1]


def test_readme_names_every_template_field_that_a_person_fills() -> None:
    readme = (templates_dir() / "README.md").read_text("utf-8")
    fields = set()
    for path in Path(templates_dir()).glob("*/config.pbtxt"):
        fields |= set(Template(path.read_text("utf-8")).get_identifiers())
    missing = fields - set(ENGINE_FIELDS) - set(re.findall(r"`(\w+)`", readme))
    assert not missing
