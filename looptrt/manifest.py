"""The engine directory's config.json: what the builder wrote and the runtime checks.

Owns the file's layout and the check of versions and checksums; leaves its content to
`builder` and its use to `runtime`. Invariant: `load` returns only manifests whose files
are present, complete and unchanged.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looptrt.errors import LooptrtError, ManifestError
from looptrt.kv_layout import PlaneLayout
from looptrt.loop_spec import LoopSpec, NoiseMode

FORMAT = 1
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "rank0.safetensors"
PHASES = ("prelude", "core", "coda")


@dataclass(frozen=True)
class BuildLimits:
    """Shape limits an engine was built for (trtllm-build's flags of the same names)."""

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int


@dataclass(frozen=True)
class TokenIds:
    """Special tokens, decided once at build time.

    Attributes:
        bos: id put in front of a prompt by the tokenizer, or None.
        eos: every id that ends an answer.
        pad: padding id, or None.
        source: where `eos` came from, in words.
    """

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    source: str


@dataclass(frozen=True)
class PhaseGraph:
    """One phase's graph: file names relative to the directory, tensor names in order."""

    onnx: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    engine: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything an engine directory says of itself.

    Attributes:
        version: looptrt version that built it.
        backend: `pytorch`, `tensorrt` or `tensorrt_rtx`.
        dtype: weights and activations; logits_dtype: the head's output.
        fingerprint: SHA-256 over the model's weights and spec; equal models have equal ones.
        files: {name: (sha256, bytes)} of every file but config.json.
        build_flags: the full flag set of the build, for the record.
        tools: versions of the tools that built it.
    """

    version: str
    backend: str
    dtype: str
    logits_dtype: str
    spec: LoopSpec
    layout: PlaneLayout
    limits: BuildLimits
    noise_mode: NoiseMode
    tokens: TokenIds
    phases: dict[str, PhaseGraph]
    fingerprint: str
    files: dict[str, tuple[str, int]]
    build_flags: dict[str, Any]
    tools: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """config.json in TensorRT-LLM's layout plus a `looptrt` section with its checksum."""
        data = self._content()
        data["looptrt"]["checksum"] = _checksum(data)
        return data

    def _content(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "version": self.version,
            "pretrained_config": {
                "architecture": spec.architecture,
                "dtype": self.dtype,
                "logits_dtype": self.logits_dtype,
                "vocab_size": spec.vocab_size,
                "hidden_size": spec.hidden_size,
                "intermediate_size": spec.intermediate_size,
                "num_hidden_layers": spec.prelude_layers + spec.core_layers + spec.coda_layers,
                "num_attention_heads": spec.num_heads,
                "num_key_value_heads": spec.num_kv_heads,
                "head_size": spec.head_dim,
                "max_position_embeddings": spec.max_position,
                "norm_epsilon": spec.norm_eps,
                "rotary_base": spec.rope.base,
                "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
                "loop_spec": spec.to_json(),
            },
            "build_config": {
                "max_batch_size": self.limits.max_batch_size,
                "max_input_len": self.limits.max_input_len,
                "max_seq_len": self.limits.max_seq_len,
                "max_num_tokens": self.limits.max_num_tokens,
                "kv_cache_type": "PAGED",
                "plugin_config": {
                    "tokens_per_block": self.layout.page_size,
                    "paged_kv_cache": True,
                },
                "flags": self.build_flags,
            },
            "looptrt": {
                "format": FORMAT,
                "backend": self.backend,
                "plane_layout": self.layout.to_json(),
                "noise_mode": self.noise_mode,
                "tokens": {
                    "bos": self.tokens.bos,
                    "eos": list(self.tokens.eos),
                    "pad": self.tokens.pad,
                    "source": self.tokens.source,
                },
                "phases": {
                    name: {
                        "onnx": graph.onnx,
                        "inputs": list(graph.inputs),
                        "outputs": list(graph.outputs),
                        "engine": graph.engine,
                    }
                    for name, graph in self.phases.items()
                },
                "fingerprint": self.fingerprint,
                "files": {
                    name: {"sha256": digest, "bytes": size}
                    for name, (digest, size) in sorted(self.files.items())
                },
                "tools": self.tools,
            },
        }

    @staticmethod
    def from_json(data: dict[str, Any], where: Path) -> Manifest:
        """Read config.json's content.

        Raises:
            ManifestError: not a looptrt engine directory, another format, or a key is
                missing or malformed.
        """
        section = data.get("looptrt") if isinstance(data, dict) else None
        if not isinstance(section, dict):
            raise ManifestError(
                f"{where}: no `looptrt` section; this is not an engine directory of looptrt, "
                "build one with `looptrt build`"
            )
        if section.get("format") != FORMAT:
            raise ManifestError(
                f"{where}: engine directory format {section.get('format')!r}, this looptrt reads "
                f"format {FORMAT}; rebuild it with `looptrt build`"
            )
        if section.get("checksum") != _checksum(data):
            raise ManifestError(
                f"{where}: changed since it was built (expected checksum "
                f"{section.get('checksum')}, found {_checksum(data)}); rebuild the engine directory"
            )
        try:
            pretrained, build = data["pretrained_config"], data["build_config"]
            return Manifest(
                version=data["version"],
                backend=section["backend"],
                dtype=pretrained["dtype"],
                logits_dtype=pretrained["logits_dtype"],
                spec=LoopSpec.from_json(pretrained["loop_spec"]),
                layout=PlaneLayout.from_json(section["plane_layout"]),
                limits=BuildLimits(
                    **{name: build[name] for name in BuildLimits.__dataclass_fields__}
                ),
                noise_mode=NoiseMode(section["noise_mode"]),
                tokens=TokenIds(
                    bos=section["tokens"]["bos"],
                    eos=tuple(section["tokens"]["eos"]),
                    pad=section["tokens"]["pad"],
                    source=section["tokens"]["source"],
                ),
                phases={
                    name: PhaseGraph(
                        onnx=graph["onnx"],
                        inputs=tuple(graph["inputs"]),
                        outputs=tuple(graph["outputs"]),
                        engine=graph["engine"],
                    )
                    for name, graph in section["phases"].items()
                },
                fingerprint=section["fingerprint"],
                files={
                    name: (entry["sha256"], entry["bytes"])
                    for name, entry in section["files"].items()
                },
                build_flags=build["flags"],
                tools=section["tools"],
            )
        except (KeyError, TypeError, ValueError, AttributeError, LooptrtError) as error:
            raise ManifestError(f"{where}: malformed manifest: {error!r}") from error

    @staticmethod
    def load(engine_dir: Path) -> Manifest:
        """Read and verify an engine directory: presence, sizes and checksums of its files.

        Raises:
            ManifestError: the directory or a file is missing, cut or changed; names it and
                says what was expected and found.
        """
        path = engine_dir / CONFIG_NAME
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ManifestError(f"{path}: no such file; not an engine directory") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ManifestError(f"{path}: cannot be read: {error}") from error
        manifest = Manifest.from_json(data, path)
        for name, (digest, size) in manifest.files.items():
            _verify_file(engine_dir / name, digest, size)
        return manifest


def is_engine_dir(path: Path) -> bool:
    """Whether a directory says that it is an engine directory, in whatever state it is."""
    try:
        data = json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and isinstance(data.get("looptrt"), dict)


def _checksum(data: dict[str, Any]) -> str:
    """SHA-256 of a manifest's content but its checksum, whatever its formatting."""
    section = {key: value for key, value in data["looptrt"].items() if key != "checksum"}
    content = {**data, "looptrt": section}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify_file(path: Path, digest: str, size: int) -> None:
    if not path.is_file():
        raise ManifestError(f"{path}: missing; rebuild the engine directory")
    found_size = path.stat().st_size
    if found_size != size:
        raise ManifestError(
            f"{path}: expected {size} bytes, found {found_size}; rebuild or copy again"
        )
    found = sha256_of(path)
    if found != digest:
        raise ManifestError(
            f"{path}: expected SHA-256 {digest}, found {found}; rebuild or copy again"
        )
