"""Objects to JSON bytes.

Invariant: the bytes are valid UTF-8 and strict JSON, whatever a caller put into a string.
"""

from __future__ import annotations

import json


def json_bytes(value: object) -> bytes:
    """Compact JSON; lone surrogates, which UTF-8 cannot hold, stay escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")
