"""What the server's side reads of an engine directory, without its weights.

Owns cheap reads for launcher and text models; leaves the verification of all files to the
engine, which does it when it starts. Invariant: nothing here reads a file of weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from looptrt.errors import ManifestError
from looptrt.manifest import CONFIG_NAME, Manifest


def read_manifest(engine_dir: Path) -> Manifest:
    """The manifest, itself verified, of a directory whose files are not.

    Raises:
        ManifestError: there is none, or it was changed.
    """
    path = engine_dir / CONFIG_NAME
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such file; not an engine directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"{path}: cannot be read: {error}") from error
    return Manifest.from_json(data, path)
