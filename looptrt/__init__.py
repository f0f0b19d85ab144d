"""looptrt: looped language models, from a checkpoint to an engine directory to answers.

`LLM` and `SamplingParams` load on first use, so that `import looptrt` stays cheap and the
builder never loads the runtime. Every other public name lives in its own module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from looptrt.runtime.llm import LLM
    from looptrt.runtime.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "looptrt.runtime.llm", "SamplingParams": "looptrt.runtime.sampling_params"}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module attribute is of any type
    if name not in _HOMES:
        raise AttributeError(f"module 'looptrt' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
