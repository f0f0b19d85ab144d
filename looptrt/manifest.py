"""The engine directory's config.json: what the builder wrote and the runtime checks.

Owns the file's layout and the check of versions and checksums; leaves its content to
`builder` and its use to `runtime`. Invariant: `load` returns only manifests whose files
are present, complete and unchanged.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looptrt.errors import LooptrtError, ManifestError
from looptrt.kv_layout import DTYPE_BYTES, PlaneLayout
from looptrt.loop_spec import LoopSpec, NoiseMode

FORMAT = 2
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "rank0.safetensors"
PHASES = ("prelude", "core", "coda")
TENSORRT_BACKENDS = ("tensorrt", "tensorrt_rtx")
BACKENDS = ("pytorch", *TENSORRT_BACKENDS)

_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)


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
class ShapeRange:
    """Sizes of an input that a TensorRT engine takes, least and most, and what it is tuned for."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True)
class EngineFile:
    """One phase compiled by TensorRT.

    Attributes:
        file: its name, relative to the directory.
        tensorrt: version of the TensorRT that built it, the only one that loads it.
        compute_capabilities: GPUs that it runs on, as `8.9`.
        plugins: {operator: layers of it}.
        schema: SHA-256 of the operators' schema, which the plugin library must share.
        library: SHA-256 of the plugin library it was built with, for the record.
        profiles: {profile: {input: sizes}}, in the order of their numbers in the engine, the
            narrowest first.
    """

    file: str
    tensorrt: str
    compute_capabilities: tuple[str, ...]
    plugins: dict[str, int]
    schema: str
    library: str
    profiles: dict[str, dict[str, ShapeRange]]

    @staticmethod
    def from_json(data: dict[str, Any]) -> EngineFile:
        """Read what `dataclasses.asdict` made."""
        profiles = {
            profile: {
                name: ShapeRange(*(tuple(sizes[end]) for end in ("min", "opt", "max")))
                for name, sizes in inputs.items()
            }
            for profile, inputs in data["profiles"].items()
        }
        capabilities = tuple(data["compute_capabilities"])
        return EngineFile(**data | {"compute_capabilities": capabilities, "profiles": profiles})


@dataclass(frozen=True)
class PhaseGraph:
    """One phase's graph: file names relative to the directory, tensor names in order."""

    onnx: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    engine: EngineFile | None = None


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
                        "engine": graph.engine and dataclasses.asdict(graph.engine),
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
                f"{where}: engine directory format {section.get('format')!r:.60}, this looptrt "
                f"reads format {FORMAT}; rebuild it with `looptrt build`"
            )
        checksum = section.get("checksum")
        if checksum != _checksum(data):
            raise ManifestError(
                f"{where}: changed since it was built (expected checksum "
                f"{checksum!s:.64}, found {_checksum(data)}); rebuild the engine directory"
            )
        try:
            manifest = Manifest._of_sections(data, section)
            _check(manifest)
        except (*_MALFORMED, LooptrtError) as error:
            raise ManifestError(f"{where}: malformed manifest: {error!r:.200}") from error
        return manifest

    @staticmethod
    def _of_sections(data: dict[str, Any], section: dict[str, Any]) -> Manifest:
        pretrained, build = data["pretrained_config"], data["build_config"]
        return Manifest(
            version=data["version"],
            backend=section["backend"],
            dtype=pretrained["dtype"],
            logits_dtype=pretrained["logits_dtype"],
            spec=LoopSpec.from_json(pretrained["loop_spec"]),
            layout=PlaneLayout.from_json(section["plane_layout"]),
            limits=BuildLimits(**{name: build[name] for name in BuildLimits.__dataclass_fields__}),
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
                    engine=graph["engine"] and EngineFile.from_json(graph["engine"]),
                )
                for name, graph in section["phases"].items()
            },
            fingerprint=section["fingerprint"],
            files={
                name: (entry["sha256"], entry["bytes"]) for name, entry in section["files"].items()
            },
            build_flags=build["flags"],
            tools=section["tools"],
        )

    @staticmethod
    def load(engine_dir: Path) -> Manifest:
        """Read and verify an engine directory: presence, sizes and checksums of its files.

        Raises:
            ManifestError: the directory or a file is missing, cut or changed; names it and
                says what was expected and found.
        """
        path = engine_dir / CONFIG_NAME
        if path.exists() and not path.is_file():
            raise ManifestError(f"{path}: expected a regular file; not an engine directory")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            manifest = Manifest.from_json(data, path)
        except FileNotFoundError:
            raise ManifestError(f"{path}: no such file; not an engine directory") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ManifestError(f"{path}: cannot be read: {error}") from error
        for name, (digest, size) in manifest.files.items():
            _verify_file(engine_dir / name, digest, size)
        return manifest


def _check(manifest: Manifest) -> None:
    """Check the types and ranges that reading JSON into dataclasses does not.

    Raises:
        ValueError: names the field.
    """
    spec = manifest.spec
    parts: list[Any] = [
        manifest,
        spec,
        spec.rope,
        manifest.limits,
        manifest.tokens,
        manifest.layout,
    ]
    parts += [*manifest.phases.values(), *([spec.rope.scaling] if spec.rope.scaling else [])]
    engines = _engines(manifest)
    parts += engines
    for engine in engines:
        parts += [sizes for inputs in engine.profiles.values() for sizes in inputs.values()]
    for part in parts:
        for field in dataclasses.fields(part):
            is_sound = _SOUND.get(str(field.type))
            if is_sound is not None and not is_sound(getattr(part, field.name)):
                raise ValueError(f"{field.name}: not {field.type} of a usable size")
    if min(vars(manifest.limits).values()) < 1:
        raise ValueError("limits: expected at least 1 each")
    if not {manifest.dtype, manifest.logits_dtype} <= DTYPE_BYTES.keys():
        raise ValueError(f"dtypes: expected two of {', '.join(DTYPE_BYTES)}")
    if manifest.phases.keys() != set(PHASES):
        raise ValueError(f"phases: expected {', '.join(PHASES)}")
    for name in manifest.files:
        if Path(name).name != name or "\0" in name:
            raise ValueError(f"files: expected a plain name, found {name!r:.60}")


def _engines(manifest: Manifest) -> list[EngineFile]:
    """The engines, which a backend has of all phases or of none.

    Raises:
        ValueError: they do not fit the backend or their phase, or are not among the files.
    """
    if manifest.backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}")
    engines = [graph.engine for graph in manifest.phases.values() if graph.engine is not None]
    if len(engines) != (len(PHASES) if manifest.backend in TENSORRT_BACKENDS else 0):
        raise ValueError(f"phases: {len(engines)} engines do not fit backend {manifest.backend}")
    if not {engine.file for engine in engines} <= manifest.files.keys():
        raise ValueError("files: an engine is not listed")
    for name, graph in manifest.phases.items():
        profiles = () if graph.engine is None else graph.engine.profiles.values()
        if graph.engine is not None and not profiles:
            raise ValueError(f"phases: {name}: an engine without profiles")
        if any(set(inputs) != set(graph.inputs) for inputs in profiles):
            raise ValueError(f"phases: {name}: a profile is not of the phase's inputs")
    return engines


def _is_int(value: object, most: int = 2**31 - 1) -> bool:
    return type(value) is int and -most <= value <= most


def _is_float(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -(2**128) <= value <= 2**128


def _is_word(value: object) -> bool:
    return isinstance(value, str)


def _is_words(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_word, value))


def _is_file_table(value: object) -> bool:
    return isinstance(value, dict) and all(
        _is_word(digest) and _is_int(size, 2**63 - 1) for digest, size in value.values()
    )


# By the annotations of the dataclasses that a manifest is made of.
_SOUND: dict[str, Callable[[object], bool]] = {
    "int": _is_int,
    "int | None": lambda value: value is None or _is_int(value),
    "tuple[int, ...]": lambda value: isinstance(value, tuple) and all(map(_is_int, value)),
    "float": _is_float,
    "bool": lambda value: isinstance(value, bool),
    "str": _is_word,
    "str | None": lambda value: value is None or _is_word(value),
    "tuple[str, ...]": _is_words,
    "dict[str, tuple[str, int]]": _is_file_table,
    "dict[str, Any]": lambda value: isinstance(value, dict),
    "dict[str, str]": lambda value: isinstance(value, dict),
    "dict[str, int]": lambda value: isinstance(value, dict) and all(map(_is_int, value.values())),
}


def is_engine_dir(path: Path) -> bool:
    """Whether a directory says that it is an engine directory, in whatever state it is."""
    if not (path / CONFIG_NAME).is_file():
        return False
    try:
        data = json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and isinstance(data.get("looptrt"), dict)


def foreign_content(engine_dir: Path) -> list[str]:
    """Names in an engine directory that its config.json does not list as files of its own."""
    section = json.loads((engine_dir / CONFIG_NAME).read_text(encoding="utf-8"))["looptrt"]
    files = section.get("files")
    listed = {CONFIG_NAME, *(files if isinstance(files, dict) else ())}
    with os.scandir(engine_dir) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.name not in listed or entry.is_dir(follow_symlinks=False)
        )


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
