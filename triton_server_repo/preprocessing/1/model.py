"""`preprocessing`: see looptrt.runtime.triton.text_models."""

import triton_python_backend_utils as pb_utils

from looptrt.runtime.triton import models


class TritonPythonModel:
    """Texts to token ids."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the tokenizer."""
        self._model = models.preprocessing(pb_utils, args)

    def execute(self, requests: list) -> list:
        """A response for each request."""
        return self._model.execute(requests)
