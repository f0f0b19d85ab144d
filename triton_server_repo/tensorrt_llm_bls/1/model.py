"""`tensorrt_llm_bls`: see looptrt.runtime.triton.bls."""

import triton_python_backend_utils as pb_utils

from looptrt.runtime.triton.models import BlsModel


class TritonPythonModel:
    """The three models in a row, as one."""

    def initialize(self, args: dict[str, str]) -> None:
        """Make ready for requests."""
        self._model = BlsModel(pb_utils, args)

    def execute(self, requests: list) -> None:
        """Start requests; their responses come later."""
        self._model.execute(requests)

    def finalize(self) -> None:
        """End everything."""
        self._model.finalize()
