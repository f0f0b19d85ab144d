"""Arms: ways to run the same requests, each a set of settings that differ from the default's.

Owns their names, fields, the predefined `base` and the size of each one's KV pool; leaves
running to `runs`. Invariant: the engines of a comparison hold pools of the same bytes, and an
arm's setting that this looptrt does not have is an error, never left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from looptrt.errors import EngineError
from looptrt.kv_layout import PlaneLayout
from looptrt.runtime.config import EngineConfig
from looptrt.runtime.llm import LLM
from looptrt.runtime.sampling_params import SamplingParams

DEFAULT = "default"
_CONFIG_FIELDS = frozenset(EngineConfig.__dataclass_fields__)
_POOL_FIELDS = frozenset({"kv_cache_bytes", "kv_cache_free_gpu_memory_fraction"})
_REQUEST_FIELDS = frozenset(SamplingParams.__dataclass_fields__) - {"n", "max_tokens"}
# Of the memory that the weights leave, for the pools of all arms together; the rest is for the
# other arms' weights, steps and graphs.
_POOLS_SHARE = 0.8


class KvLayout(StrEnum):
    """How an arm's pool is reckoned.

    `ALL_LAYERS` keeps the engine's units and takes away as many of them as a layout with all
    layers in the plane of each depth would need more memory for a page.
    """

    UNITS = "units"
    ALL_LAYERS = "all_layers"


@dataclass(frozen=True)
class Arm:
    """One way to run the requests.

    Attributes:
        config: `EngineConfig` fields that differ.
        request: `SamplingParams` fields that differ.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    kv_layout: KvLayout = KvLayout.UNITS

    def __post_init__(self) -> None:
        for name in (
            *(self.config.keys() - _CONFIG_FIELDS),
            *(self.request.keys() - _REQUEST_FIELDS),
        ):
            raise EngineError(f"arm {self.name}: this looptrt has no setting {name!r}")
        if asked := sorted(self.config.keys() & _POOL_FIELDS):
            raise EngineError(
                f"arm {self.name}: {asked[0]}: the pools of all arms have the same bytes; set it "
                "for all of them, or the arm's kv_layout"
            )

    @staticmethod
    def parse(text: str) -> Arm:
        """Read `name=field:value,…`, or the name of a predefined arm.

        Raises:
            EngineError: malformed, or a field that neither an engine nor a request has.
        """
        name, has_fields, rest = text.partition("=")
        if not has_fields:
            return predefined(name)
        if not name or name == DEFAULT:
            raise EngineError(f"arm {text!r:.60}: expected a name of its own before the =")
        config, request, layout = {}, {}, KvLayout.UNITS
        for item in rest.split(","):
            field_name, colon, value = item.partition(":")
            if not colon:
                raise EngineError(f"arm {name}: expected field:value, got {item!r:.60}")
            if field_name == "kv_layout":
                layout = _layout(name, value)
            elif field_name in _CONFIG_FIELDS:
                config[field_name] = _value(value)
            elif field_name in _REQUEST_FIELDS:
                request[field_name] = _value(value)
            else:
                known = ", ".join(sorted({*_CONFIG_FIELDS, *_REQUEST_FIELDS, "kv_layout"}))
                raise EngineError(f"arm {name}: unknown field {field_name!r:.40}; known: {known}")
        return Arm(name, config, request, layout)

    def engine_config(self, default: EngineConfig) -> EngineConfig:
        """The default's settings with this arm's."""
        return dataclasses.replace(default, **self.config)

    def params(self, default: SamplingParams) -> SamplingParams:
        """The default's request settings with this arm's."""
        return dataclasses.replace(default, **self.request)

    def to_json(self) -> dict[str, Any]:
        """What differs from the default."""
        return {
            "config": dict(self.config),
            "request": dict(self.request),
            "kv_layout": self.kv_layout.value,
        }


def predefined(name: str) -> Arm:
    """An arm by its name.

    `base` is what an engine without this project's work does: operators one by one, one graph
    for each loop, prompts prefilled one request at a time, all layers in the plane of each
    depth, no prefix cache (docs/bench.md).

    Raises:
        EngineError: there is no such arm, or this looptrt lacks a switch that it needs.
    """
    if name != "base":
        raise EngineError(f"arm {name!r:.40}: expected name=field:value,… or base")
    settings = {
        "cuda_graphs": "loop",
        "fused_kernels": False,
        "skinny_linear_rows": 0,
        "packed_prefill": False,
        "enable_prefix_cache": False,
    }
    return Arm("base", settings, kv_layout=KvLayout.ALL_LAYERS)


def with_default(arms: Sequence[Arm]) -> list[Arm]:
    """The arms behind the default one.

    Raises:
        EngineError: two have the same name.
    """
    names = [DEFAULT, *(arm.name for arm in arms)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise EngineError(f"arms: {', '.join(sorted(twice))}: given twice")
    return [Arm(DEFAULT), *arms]


def all_layers_bytes(layout: PlaneLayout, pool_bytes: int) -> int:
    """Bytes of a pool of units that holds what `pool_bytes` hold with all layers in each plane."""
    loops = layout.max_loops
    ratio = min(1.0, layout.units_of_page(loops) / layout.all_layers_units(loops))
    units = int((pool_bytes // layout.unit_bytes - 1) * ratio) + 1
    return units * layout.unit_bytes


def tokens_held(layout: PlaneLayout, pool_units: int, loops: int, kv_layout: KvLayout) -> int:
    """Tokens at `loops` loops in full pages that a pool holds.

    Args:
        layout: of the engine.
        pool_units: units that requests may own.
        loops: of every token.
        kv_layout: how a page is reckoned.
    """
    page = float(layout.units_of_page(loops))
    if kv_layout is KvLayout.ALL_LAYERS:
        page = layout.all_layers_units(loops)
    return int(pool_units / page) * layout.page_size


@contextlib.contextmanager
def engines(
    engine_dir: Path, default: EngineConfig, arms: Sequence[Arm], *, in_process: bool = False
) -> Iterator[dict[str, LLM]]:
    """One running engine an arm, by name, in the order given.

    All live at the same time, so that runs can alternate. Where the default leaves the pool's
    size open, the first engine's is sized to leave room for the others, which get as many
    bytes. Arms whose engines are set alike share one.

    Raises:
        EngineError: an engine cannot start with its arm's settings; names the arm.
    """
    with contextlib.ExitStack() as stack:
        started: dict[EngineConfig, LLM] = {}
        running: dict[str, LLM] = {}
        pool_bytes = default.kv_cache_bytes
        num_engines = len({(arm.engine_config(default), arm.kv_layout) for arm in arms})
        if pool_bytes is None and num_engines > 1:
            share = min(default.kv_cache_free_gpu_memory_fraction, _POOLS_SHARE) / num_engines
            default = dataclasses.replace(default, kv_cache_free_gpu_memory_fraction=share)
        for arm in arms:
            config = arm.engine_config(default)
            if pool_bytes is not None:
                config = dataclasses.replace(config, kv_cache_bytes=pool_bytes)
            if arm.kv_layout is KvLayout.ALL_LAYERS:
                config = _reduced(config, running)
            try:
                if config not in started:
                    llm = LLM(engine_dir, config, in_process=in_process)
                    started[config] = stack.enter_context(llm)
            except EngineError as error:
                raise EngineError(f"arm {arm.name}: {error}") from error
            running[arm.name] = llm = started[config]
            if pool_bytes is None:
                pool_bytes = _pool_bytes(llm)
                started[dataclasses.replace(config, kv_cache_bytes=pool_bytes)] = llm
        # A full collection of what is loaded by now stops this process, which keeps the time,
        # for a tenth of a second.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        yield running


def _pool_bytes(llm: LLM) -> int:
    """Bytes of a running engine's pool, the null unit included."""
    return (int(llm.stats()["num_units"]) + 1) * llm.manifest.layout.unit_bytes


def _reduced(config: EngineConfig, running: Mapping[str, LLM]) -> EngineConfig:
    if config.kv_cache_bytes is None or not running:
        raise EngineError("kv_layout all_layers: the default arm comes first")
    layout = next(iter(running.values())).manifest.layout
    num_bytes = all_layers_bytes(layout, config.kv_cache_bytes)
    return dataclasses.replace(config, kv_cache_bytes=num_bytes)


def _layout(name: str, value: str) -> KvLayout:
    if value not in set(KvLayout):
        raise EngineError(f"arm {name}: kv_layout: expected units or all_layers, got {value!r:.40}")
    return KvLayout(value)


def _value(text: str) -> Any:  # noqa: ANN401 - any JSON scalar
    """A JSON scalar, else the text itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, dict | list) else value
