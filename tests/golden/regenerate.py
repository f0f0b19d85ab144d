"""Rewrite the golden files: `python -m tests.golden.regenerate`; review the diff."""

from __future__ import annotations

import json
from pathlib import Path

from tests.golden.onnx_ops import onnx_ops

FOLDER = Path(__file__).parent
GOLDENS = {"onnx_ops.json": onnx_ops}


def main() -> None:
    """Write every golden file."""
    for name, make in GOLDENS.items():
        text = json.dumps(make(), indent=1) + "\n"
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
