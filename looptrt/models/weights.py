"""An engine's weights, from rank0.safetensors into a model.

Owns the way back from stored names to a module; leaves writing the file to the builder and
its checksum to the manifest. Invariant: every tensor of the model comes from the file, and
every tensor of the file goes into the model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from looptrt.errors import ManifestError
from looptrt.manifest import WEIGHTS_NAME, Manifest
from looptrt.models.blocks import LoopedModel, build, stored_names


def empty_model(manifest: Manifest) -> LoopedModel:
    """The model that a manifest describes, with shapes only (meta device).

    The manifest's LoopSpec says all: the family that read the checkpoint, its package or its
    file are not needed and not looked for.
    """
    return build(
        manifest.spec,
        manifest.layout,
        max_positions=manifest.limits.max_seq_len,
        dtype=getattr(torch, manifest.dtype),
        noise_mode=manifest.noise_mode,
        logits_dtype=getattr(torch, manifest.logits_dtype),
        device="meta",
    )


def load_model(engine_dir: Path, manifest: Manifest, device: str = "cpu") -> LoopedModel:
    """Load the model of an engine directory, ready to run.

    On the CPU its tensors are the mapped file: nothing is copied, and pages that a graph
    never touches are never read.

    Raises:
        ManifestError: the weight file is unreadable, or its tensors are not exactly the
            model's; names the tensor, what was expected and what was found.
    """
    path = engine_dir / WEIGHTS_NAME
    model = empty_model(manifest)
    names = stored_names(model)
    shapes = model.state_dict()
    tensors = _read(path, device)
    for name in {*names.values()} ^ tensors.keys():
        state = "missing" if name not in tensors else "unknown to the model"
        raise ManifestError(f"{path}: tensor {name!r}: {state}; rebuild the engine directory")
    for name, tensor in tensors.items():
        expected = shapes[name]
        if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
            raise ManifestError(
                f"{path}: tensor {name!r}: expected {expected.dtype} {list(expected.shape)}, "
                f"found {tensor.dtype} {list(tensor.shape)}; rebuild the engine directory"
            )
    model.load_state_dict({name: tensors[stored] for name, stored in names.items()}, assign=True)
    return model.eval()


def _read(path: Path, device: str) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt", device=device) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ManifestError(f"{path}: cannot be read: {error}") from error
