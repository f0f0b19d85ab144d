"""`/metrics` as Prometheus reads it."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.endpoint import MODEL, Endpoint
from tests.support.scripted import DEADLINE_S

# Labels of TensorRT-LLM's families that existing dashboards select by.
TENSORRT_LLM = {
    "nv_trt_llm_request_metrics": (
        "request_type",
        {"waiting", "active", "max", "scheduled", "context"},
    ),
    "nv_trt_llm_runtime_memory_metrics": ("memory_type", {"cpu", "gpu"}),
    "nv_trt_llm_kv_cache_block_metrics": (
        "kv_cache_block_type",
        {"max", "free", "used", "tokens_per", "reused", "fraction"},
    ),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        {"total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"},
    ),
    "nv_trt_llm_general_metrics": ("general_type", {"timestamp", "iteration_counter"}),
}


def test_text_parses_and_holds_tensorrt_llms_families(endpoint: Endpoint) -> None:
    endpoint.post("completions", prompt="a=1;", max_tokens=3)
    made = httpx.get(f"{endpoint.url}/metrics", timeout=DEADLINE_S)
    assert made.headers["Content-Type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(made.text)}
    for name, (label, values) in TENSORRT_LLM.items():
        assert families[name].type == "gauge"
        assert {sample.labels[label] for sample in families[name].samples} == values
    for family in families.values():
        assert family.documentation
        for sample in family.samples:
            if not family.name.startswith("looptrt_http"):
                assert (sample.labels["model"], sample.labels["version"]) == (MODEL, "1")
    lengths = families["nv_llm_output_token_len"]
    assert lengths.type == "histogram"
    counts = {s.labels["le"]: s.value for s in lengths.samples if s.name.endswith("_bucket")}
    assert list(counts) == ["10.0", "50.0", "100.0", "500.0", "1000.0", "+Inf"]
    assert list(counts.values()) == sorted(counts.values())
    assert counts["+Inf"] >= 1


def test_counts_move_with_the_requests(endpoint: Endpoint) -> None:
    def figures() -> tuple[float, ...]:
        return (
            endpoint.figure("looptrt_requests_total", finish_reason="length"),
            endpoint.figure("looptrt_generated_tokens_total"),
            endpoint.figure("looptrt_prompt_tokens_total"),
            endpoint.figure("looptrt_prefix_hit_tokens_total"),
            endpoint.figure("looptrt_loop_depth_sum"),
            endpoint.figure("looptrt_time_to_first_token_seconds_count"),
            endpoint.figure("looptrt_time_per_output_token_seconds_count"),
        )

    before = figures()
    prompt = [5] * 33
    fields = {"prompt": prompt, "max_tokens": 4, "loops": 3, "ignore_eos": True}
    for _ in range(2):
        assert endpoint.post("completions", **fields).status_code == 200
    assert [b - a for a, b in zip(before, figures(), strict=True)] == [2, 8, 66, 32, 24, 2, 2]
