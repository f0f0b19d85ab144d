"""The tensor tables of docs/triton.md: `python -m looptrt.runtime.triton.tensor_docs PAGE`.

Owns the form of the tables; leaves every fact to `tensors`. Invariant: what stands between the
page's marks is this text and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from looptrt.runtime.triton.tensors import MODELS, Tensor

BEGIN = "<!-- tensors: written by looptrt.runtime.triton.tensor_docs -->"
END = "<!-- end of tensors -->"

_TITLES = (
    ("ensemble", "`ensemble` and `tensorrt_llm_bls`"),
    ("tensorrt_llm", "`tensorrt_llm`"),
    ("preprocessing", "`preprocessing`"),
    ("postprocessing", "`postprocessing`"),
)


def tables() -> str:
    """All tables, marks included."""
    lines = [BEGIN]
    for model, title in _TITLES:
        tensors = MODELS[model]
        lines += ["", f"### {title}", "", *_table("input", _served(tensors.inputs))]
        lines += ["", *_table("output", tensors.outputs)]
        refused = [tensor for tensor in tensors.inputs if tensor.refusal is not None]
        if refused:
            lines += ["", "Refused by name, with the reason:", "", *_refusals(refused)]
    more = set(MODELS["tensorrt_llm_bls"].inputs) - set(MODELS["ensemble"].inputs)
    names = ", ".join(
        f"`{tensor.name}`" for tensor in MODELS["tensorrt_llm_bls"].inputs if tensor in more
    )
    lines += ["", f"`tensorrt_llm_bls` also refuses {names} above 0.", "", END]
    return "\n".join(lines)


def write(page: Path) -> None:
    """Replace the tables of a page.

    Raises:
        ValueError: the page has no marks.
    """
    before, begin, rest = page.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: expected the lines {BEGIN} and {END}")
    page.write_text(f"{before}{tables()}{after}", "utf-8")


def _served(inputs: Iterable[Tensor]) -> Iterator[Tensor]:
    return (tensor for tensor in inputs if tensor.refusal is None)


def _table(kind: str, tensors: Iterable[Tensor]) -> Iterator[str]:
    yield f"| {kind} | type | shape | |"
    yield "|---|---|---|---|"
    for tensor in tensors:
        marks = "" if tensor.optional else "**required**: "
        marks += "*ours*: " if tensor.is_ours else ""
        yield f"| `{tensor.name}` | {tensor.dtype} | {list(tensor.dims)} | {marks}{tensor.text} |"


def _refusals(tensors: Iterable[Tensor]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for tensor in tensors:
        reasons.setdefault(tensor.text, []).append(f"`{tensor.name}`")
    yield "| input | |"
    yield "|---|---|"
    for reason, names in reasons.items():
        yield f"| {', '.join(names)} | {reason} |"


if __name__ == "__main__":
    write(Path(sys.argv[1]))
