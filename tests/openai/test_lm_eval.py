"""lm-evaluation-harness's `local-completions` against the endpoint, on the look-up task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from lookup_task import BOS, encode, load_samples
from looptrt.runtime.llm import LLM
from looptrt.runtime.sampling_params import SamplingParams
from tests.support.endpoint import MODEL, Endpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_SAMPLES = 24
TASKS = {
    "lookup_choice": """
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{target}}"
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "lookup_answer": """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
generation_kwargs: {until: [";"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def write_task(directory: Path) -> list[dict[str, object]]:
    """Both tasks over the same questions; a choice is wrong in one digit or right."""
    random, documents = Random(3), []
    for sample in load_samples(EXAMPLES / "data" / "heldout_eval.jsonl")[:NUM_SAMPLES]:
        wrong = [sample.answer[:1] + digit + sample.answer[2:] for digit in "0123456789"]
        wrong = random.sample([text for text in wrong if text != sample.answer], 3)
        target = random.randrange(4)
        choices = [*wrong[:target], sample.answer, *wrong[target:]]
        document = {"prompt": sample.prompt, "choices": choices, "target": target}
        documents.append({**document, "answer": sample.answer})
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, body in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ntest_split: test\n"
        files = f"dataset_kwargs: {{data_files: {{test: {json.dumps(str(data))}}}}}\n"
        (directory / f"{name}.yaml").write_text(head + files + body)
    return documents


def run_lm_eval(
    endpoint: Endpoint, directory: Path, tasks: str, **model_args: object
) -> dict[str, dict[str, float]]:
    """Its results by task."""
    settings = {
        "model": MODEL,
        "base_url": f"{endpoint.url}/v1/completions",
        "num_concurrent": 4,
        "max_retries": 1,
        **model_args,
    }
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in settings.items())),
        *("--tasks", tasks, "--include_path", str(directory)),
        *("--output_path", str(directory / "out"), "--batch_size", "4"),
    ]
    environment = {
        **os.environ,  # noqa: TID251 - the child needs PATH and the like
        "HF_HOME": str(directory / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OPENAI_API_KEY": "none",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    (path,) = (directory / "out").rglob("results_*.json")
    results: dict[str, dict[str, float]] = json.loads(path.read_text())["results"]
    return results


def choice_accuracy(llm: LLM, documents: list[dict[str, object]]) -> float:
    """Share of questions whose right choice the LLM itself finds most likely."""
    num_right = 0
    for document in documents:
        prompt = encode(str(document["prompt"]))
        choices = document["choices"]
        assert isinstance(choices, list)
        full = [[BOS, *prompt, *encode(choice)] for choice in choices]
        scores = []
        for output in llm.generate(full, SamplingParams(max_tokens=1, prompt_logprobs=0)):
            assert output.prompt_logprobs is not None
            values = output.prompt_logprobs[1 + len(prompt) :]
            scores.append(sum(at.logprobs[0] for at in values if at is not None))
        num_right += scores.index(max(scores)) == document["target"]
    return num_right / len(documents)


@pytest.mark.full
@pytest.mark.parametrize(
    "model_args",
    [
        {
            "tokenizer_backend": "huggingface",
            "tokenizer": EXAMPLES / "tiny-ouro",
            "add_bos_token": True,
        },
        {"tokenizer_backend": "none", "tokenized_requests": False},
    ],
    ids=["token ids", "texts"],
)
def test_accuracy_is_what_the_python_api_scores(
    endpoint: Endpoint, ouro: LLM, tmp_path: Path, model_args: dict[str, object]
) -> None:
    documents = write_task(tmp_path)
    params = SamplingParams(max_tokens=12, stop=(";",))
    outputs = ouro.generate([str(document["prompt"]) for document in documents], params)
    answers = [output.outputs[0].text for output in outputs]
    right = [text == document["answer"] for text, document in zip(answers, documents, strict=True)]
    scores_choices = "tokenizer" in model_args  # only a tokenizer tells how long a context is
    tasks = "lookup_choice,lookup_answer" if scores_choices else "lookup_answer"
    results = run_lm_eval(endpoint, tmp_path, tasks, **model_args)
    assert results["lookup_answer"]["exact_match,none"] == pytest.approx(sum(right) / len(right))
    assert sum(right) > len(right) / 2
    if scores_choices:
        accuracy = choice_accuracy(ouro, documents)
        assert results["lookup_choice"]["acc,none"] == pytest.approx(accuracy)
        assert accuracy > 0.5
