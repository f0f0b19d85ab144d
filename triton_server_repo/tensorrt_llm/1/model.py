"""`tensorrt_llm`: see looptrt.runtime.triton.models."""

import gc

import triton_python_backend_utils as pb_utils

from looptrt.runtime.triton.models import LlmModel


class TritonPythonModel:
    """The engine, from token ids to token ids."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine."""
        self._model = LlmModel(pb_utils, args)
        # What is loaded stays: full collections that look at it stop all streams.
        gc.collect()
        gc.freeze()

    def is_ready(self) -> bool:
        """Whether the engine is loaded and alive."""
        return self._model.is_ready()

    def execute(self, requests: list) -> None:
        """Admit requests; their responses come later."""
        self._model.execute(requests)

    def finalize(self) -> None:
        """Stop the engine."""
        self._model.finalize()
