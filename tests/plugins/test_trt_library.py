"""The plugin library inside the real TensorRT-RTX: registration, and what it says when refused.

Case D1: plugins that TensorRT does not find, finds twice, or finds in an odd place.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from looptrt.errors import PluginError
from looptrt.plugins import creators
from looptrt.plugins.schema import NAMESPACE, OPS
from tests.support.tensorrt import plugin_library, run_python, tensorrt_libraries

# A child that loads the libraries named on its command line and prints what TensorRT has then,
# and what it logged.
REGISTRY = """
import json, sys
from pathlib import Path
import tensorrt_rtx as trt
from looptrt.plugins import creators
log = []
builder = trt.Builder(creators.make_logger(trt, lambda *message: log.append(message)))
before = creators.missing_plugins(trt)
for path in sys.argv[1:]:
    creators.load_creators(trt, Path(path))
found = [
    (c.plugin_namespace, c.name, c.plugin_version, [(f.name, f.type.name) for f in c.field_names])
    for c in trt.get_plugin_registry().all_creators
]
print(json.dumps({
    "before": before,
    "creators": found,
    "missing": creators.missing_plugins(trt),
    "newer": creators.missing_plugins(trt, {"fenced_rope": "2"}),
    "errors": [text for severity, text in log if creators.is_error(severity)],
}))
"""
# A child that parses one graph and prints what TensorRT logged.
PARSE = """
import json, sys
from pathlib import Path
import tensorrt_rtx as trt
from looptrt.plugins import creators
log = []
logger = creators.make_logger(trt, lambda *message: log.append(message))
builder = trt.Builder(logger)
creators.load_creators(trt, Path(sys.argv[1]))
creators.check_parser("tensorrt_rtx")
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, logger)
is_parsed = parser.parse_from_file(sys.argv[2])
errors = [text for severity, text in log if creators.is_error(severity)]
print(json.dumps({"is_parsed": is_parsed, "errors": errors}))
"""
FIELD_TYPES = {"int": "INT32", "float": "FLOAT32"}


def registry(*libraries: str | Path, cwd: Path | None = None) -> dict[str, Any]:
    tensorrt_libraries()
    child = run_python(REGISTRY, *libraries, cwd=cwd)
    assert child.returncode == 0, child.stderr
    return dict(json.loads(child.stdout))


def ours(found: dict[str, Any]) -> dict[str, tuple[str, list[list[str]]]]:
    rows = [row for row in found["creators"] if row[0] == NAMESPACE]
    assert len(rows) == len({row[1] for row in rows})
    return {name: (version, fields) for _, name, version, fields in rows}


def test_creators_are_the_schemas_operators_with_their_attributes() -> None:
    found = registry(plugin_library())
    assert ours(found) == {
        op.name: (op.version, [[name, FIELD_TYPES[kind]] for name, kind in op.attributes])
        for op in OPS
    }
    assert (found["missing"], found["errors"]) == ([], [])


def test_inputs_and_outputs_are_compiled_from_this_schema() -> None:
    """Their order, dtypes and shapes are in the text that the library was compiled from."""
    creators.check_library(plugin_library())


def test_without_the_library_every_operator_is_named_as_missing() -> None:
    found = registry()
    names = {op.name for op in OPS}
    assert {text.split(",")[0] for text in found["before"]} == names
    assert "fenced_rope, version 1, namespace looptrt" in found["missing"]


def test_another_version_is_missing() -> None:
    found = registry(plugin_library())
    assert found["newer"] == ["fenced_rope, version 2, namespace looptrt"]


def test_a_second_copy_of_the_library_registers_nothing_twice(tmp_path: Path) -> None:
    library = plugin_library()
    copy = Path(shutil.copy(library, tmp_path / "copy.so"))
    found = registry(library, copy, library)
    assert found["errors"] == []
    assert ours(found).keys() == {op.name for op in OPS}


def test_the_library_loads_from_any_place_by_any_path(tmp_path: Path) -> None:
    folder = tmp_path / "a folder with spaces"
    folder.mkdir()
    shutil.copy(plugin_library(), folder / "plugins.so")
    for path, cwd in ((folder / "plugins.so", None), ("./plugins.so", folder)):
        assert registry(path, cwd=cwd)["missing"] == []


def test_a_library_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library", encoding="utf-8")
    for path in (text, tmp_path / "absent.so"):
        with pytest.raises(PluginError, match=f"{path}: no plugin library"):
            creators.check_library(path)


def test_a_library_of_another_schema_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library, expected = plugin_library(), "0" * 64
    monkeypatch.setattr(creators, "SCHEMA_SHA256", expected)
    with pytest.raises(PluginError, match=r"another schema of the operators \(expected 0{12}, f"):
        creators.check_library(library)


def test_a_tensorrt_that_is_not_installed_is_named_with_its_package() -> None:
    with pytest.raises(PluginError, match=r"pip install 'looptrt\[tensorrt\]'"):
        creators.import_tensorrt("tensorrt")


# What the adapters say through TensorRT's log.

Node = Callable[[], onnx.NodeProto]


def norm(**attributes: float) -> onnx.NodeProto:
    return helper.make_node(
        "fenced_rms_norm", ["x", "weight"], ["y"], domain=NAMESPACE, **attributes
    )


def rope(**attributes: int) -> onnx.NodeProto:
    inputs = ["x", "positions", "cos", "sin"]
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "interleaved": 0} | attributes
    return helper.make_node("fenced_rope", inputs, ["y"], domain=NAMESPACE, **sizes)


def parsed(node: onnx.NodeProto, folder: Path) -> dict[str, Any]:
    """Parse a graph of one node on x [T, 16] beside its operands."""
    shapes = {
        "x": (TensorProto.BFLOAT16, ["T", 16]),
        "weight": (TensorProto.BFLOAT16, [16]),
        "positions": (TensorProto.INT32, ["T"]),
        "cos": (TensorProto.BFLOAT16, [32, 2]),
        "sin": (TensorProto.BFLOAT16, [32, 2]),
    }
    inputs = [helper.make_tensor_value_info(name, *shapes[name]) for name in node.input]
    output = helper.make_tensor_value_info("y", TensorProto.BFLOAT16, ["T", 16])
    graph = helper.make_graph([node], "one node", inputs, [output])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(node.domain, 1)]
    path = folder / "graph.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    libraries = tensorrt_libraries()
    links = folder / "links"
    links.mkdir()
    (links / "libtensorrt_rtx.so").symlink_to(next(libraries.glob("libtensorrt_rtx.so.*")))
    child = run_python(PARSE, plugin_library(), path, LD_LIBRARY_PATH=str(links))
    assert child.returncode == 0, child.stderr
    return dict(json.loads(child.stdout))


def test_a_sound_node_becomes_a_plugin(tmp_path: Path) -> None:
    assert parsed(norm(eps=1e-6), tmp_path) == {"is_parsed": True, "errors": []}


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (lambda: norm(), "looptrt::fenced_rms_norm version 1: attribute eps: missing"),
        (lambda: rope(head_dim=0), "looptrt::fenced_rope version 1: no layout with num_heads 2"),
        (lambda: rope(num_heads=2**30), "no layout with num_heads 1073741824"),
        (
            lambda: helper.make_node("fenced_rms_norm", ["x"], ["y"], domain=NAMESPACE, eps=1e-6),
            "looptrt::fenced_rms_norm version 1: expected 2 inputs and 1 outputs, got 1 and 1",
        ),
    ],
    ids=["attribute", "layout", "overflow", "inputs"],
)
def test_a_node_that_cannot_be_served_is_explained_in_tensorrts_log(
    node: Node, words: str, tmp_path: Path
) -> None:
    found = parsed(node(), tmp_path)
    assert not found["is_parsed"]
    assert any(words in text for text in found["errors"]), found["errors"]


def test_a_node_of_another_namespace_is_no_plugin_of_ours(tmp_path: Path) -> None:
    node = helper.make_node("fenced_rms_norm", ["x", "weight"], ["y"], domain="other", eps=1e-6)
    found = parsed(node, tmp_path)
    assert not found["is_parsed"]
    assert any("fenced_rms_norm" in text for text in found["errors"]), found["errors"]


def test_the_declared_interfaces_are_those_of_an_sdk(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Needs TensorRT's headers: `pytest --tensorrt-include DIR`. Compiles and runs check_abi."""
    include = pytestconfig.getoption("--tensorrt-include")
    if include is None:
        pytest.skip("no TensorRT SDK: --tensorrt-include")
    source = Path(creators.__file__).resolve().parents[1]
    configure = ["cmake", "-S", source, "-B", tmp_path, "-DLOOPTRT_CUDA=ON"]
    configure += [f"-DLOOPTRT_TENSORRT_INCLUDE={include}", "-DLOOPTRT_CUDA_ARCHITECTURES=90"]
    subprocess.run(configure, check=True, capture_output=True)
    build = ["cmake", "--build", tmp_path, "--target", "looptrt_check_abi"]
    child = subprocess.run(build, check=False, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout
    assert "plugins/trt/abi agrees with TensorRT" in child.stdout
