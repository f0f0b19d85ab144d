"""Parameters of a config.pbtxt, as the server hands them to a model.

Owns their text form; leaves ranges to whoever uses the value. Invariant: a field that nobody
filled counts as not given, as in TensorRT-LLM's templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from looptrt.errors import EngineError
from looptrt.runtime.config import EngineConfig

ENGINE_FIELDS = tuple(field.name for field in fields(EngineConfig))


@dataclass(frozen=True)
class Settings:
    """Parameters by name; `decoupled` is the model's transaction policy."""

    values: Mapping[str, str]
    decoupled: bool

    @staticmethod
    def of_model(args: Mapping[str, str]) -> Settings:
        """From what the server gives to `initialize`."""
        config: dict[str, Any] = json.loads(args["model_config"])
        values = {
            name: str(parameter["string_value"])
            for name, parameter in config.get("parameters", {}).items()
        }
        policy = config.get("model_transaction_policy", {})
        return Settings(values, bool(policy.get("decoupled", False)))

    def text(self, name: str) -> str | None:
        """A parameter's text, None where it is empty or not filled in."""
        value = self.values.get(name, "").strip()
        return None if not value or value.startswith("${") else value

    def flag(self, name: str, *, default: bool) -> bool:
        """A parameter that is true or false.

        Raises:
            EngineError: it is neither.
        """
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in ("true", "false", "1", "0"):
            raise EngineError(f"parameter {name}: expected true or false, got {value!r}")
        return value.lower() in ("true", "1")

    def count(self, name: str, *, default: int) -> int:
        """A parameter that is a number above 0.

        Raises:
            EngineError: it is none.
        """
        value = self.text(name)
        if value is None:
            return default
        if not value.isdecimal() or int(value) == 0:
            raise EngineError(f"parameter {name}: expected a number above 0, got {value!r}")
        return int(value)

    def engine_dir(self, name: str) -> Path:
        """The engine directory.

        Raises:
            EngineError: it is not given.
        """
        value = self.text(name)
        if value is None:
            raise EngineError(f"parameter {name}: expected the path of an engine directory")
        return Path(value)

    def engine_config(self) -> EngineConfig:
        """The engine's settings: a parameter for each field.

        Raises:
            EngineError: a value is of the wrong type or out of range; names the field.
        """
        given = {name: value for name in ENGINE_FIELDS if (value := self.text(name)) is not None}
        return EngineConfig(**{name: _value(value) for name, value in given.items()})


def text_of(value: object) -> str:
    """A value as a parameter holds it; "" for None."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _value(text: str) -> Any:  # noqa: ANN401 - numbers, flags and names alike
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
