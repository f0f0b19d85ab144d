"""The engine at run time: scheduling, execution, text and the clients in front of it.

`ModelRunner` loads on first use: it needs torch, which the scheduler and the clients do not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from looptrt.runtime.model_runner import ModelRunner

__all__ = ["ModelRunner"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module attribute is of any type
    if name != "ModelRunner":
        raise AttributeError(f"module 'looptrt.runtime' has no attribute {name!r}")
    return import_module("looptrt.runtime.model_runner").ModelRunner
