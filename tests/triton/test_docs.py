"""docs/triton.md says what the tables in the code say."""

from __future__ import annotations

from pathlib import Path

from looptrt.runtime.metrics import Metrics
from looptrt.runtime.triton.tensor_docs import tables
from looptrt.runtime.triton.tensors import MODELS
from tests.support.tiny import layout

PAGE = Path(__file__).parents[2] / "docs" / "triton.md"
STATS = dict.fromkeys(
    (
        *("num_units", "num_free_units", "num_cached_units", "num_waiting", "num_running"),
        *("num_scheduled", "num_context", "num_context_tokens", "num_paused", "num_steps"),
        *("num_hit_tokens", "num_prompt_tokens", "num_preemptions", "num_evictions"),
        *("num_draft_tokens", "num_accepted_tokens", "num_prefill_only_steps"),
        *("cpu_memory_bytes", "gpu_memory_bytes"),
    ),
    1,
)


def test_the_page_has_the_tables_of_the_code() -> None:
    assert tables() in PAGE.read_text("utf-8"), (
        "run `python -m looptrt.runtime.triton.tensor_docs docs/triton.md`"
    )


def test_every_tensor_is_in_the_tables() -> None:
    text = tables()
    for model in MODELS.values():
        for tensor in (*model.inputs, *model.outputs):
            assert f"`{tensor.name}`" in text


def test_the_page_names_every_metric_and_what_its_own_label_may_be() -> None:
    page = PAGE.read_text("utf-8")
    for family in Metrics(layout(), max_active=4).families(STATS):
        (line,) = [one for one in page.splitlines() if f"`{family.name}`" in one]
        if family.name.startswith("nv_trt_llm"):
            for sample in family.samples:
                for label, value in sample.labels.items():
                    assert label in line
                    assert value in line
