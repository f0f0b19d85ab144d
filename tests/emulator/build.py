"""The kernels' own sources compiled for the CPU, against the machine of `shim/`.

Owns what must change in a source so that a C++ compiler takes it, and the compiler's command;
leaves what instructions do to `shim/`. Invariant: only `asm` statements and `__shared__`
declarations are rewritten, each on its own lines; an instruction that `shim/ptx.h` does not have
fails to compile.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHIM = HERE / "shim"
PLUGINS = HERE.parents[1] / "plugins"
C_API = "bindings/c_api.cpp"
ARCHITECTURE = 900

_ALWAYS = ("packed_plane_attention", "plane_copy")  # the C API calls what is no launcher there
_TIMEOUT_S = 240
_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-w",  # nvcc's own build has the warnings
    "-Dnodiscard=gnu::weak",  # of every launcher: those of kernels left out may be missing
    "-D__CUDACC__",
    f"-D__CUDA_ARCH__={ARCHITECTURE}",
    "-D__CUDA_ARCH_FEAT_SM90_ALL",
)
# Of the kernels' operands: heap with the tensors' sizes, vectors with their alignment. An offset on
# a null pointer is how a copy of zeros names no source.
_SANITIZERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize=pointer-overflow,vptr",
    "-fno-sanitize-recover=all",
)

_ASM = re.compile(r"\basm(?: volatile)?\s*\(")
_DYNAMIC = re.compile(r"\bextern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
_STATIC = re.compile(r"__shared__ (\w[^;\[\]]*?)(\w+)((?:\[[^\]]*\])*);")


class BuildError(Exception):
    """The compiler's messages, or a source that cannot be rewritten."""


@dataclass(frozen=True)
class Mutation:
    """One change of the sources that a test must notice.

    Attributes:
        file: below `plugins/`.
        old, new: text that stands there exactly once, and what takes its place.
    """

    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """The changed text.

        Raises:
            BuildError: `old` is not there exactly once.
        """
        if text.count(self.old) != 1 or self.old == self.new:
            raise BuildError(f"{self.file}: {self.old!r} is there {text.count(self.old)} times")
        return text.replace(self.old, self.new)


def sanitizer_runtime() -> Path | None:
    """The address sanitizer's library, which a process must preload, or None."""
    command = compiler()
    if command is None:
        return None
    done = subprocess.run(
        [command, "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    path = Path(done.stdout.strip())
    return path if path.is_absolute() and path.exists() else None


def compiler() -> str | None:
    """The system's C++ compiler, or None."""
    return shutil.which("g++") or shutil.which("clang++")


def sources() -> list[Path]:
    """Every kernel, its headers and the C API."""
    files = [*(PLUGINS / "kernels").iterdir(), *(PLUGINS / "include" / "looptrt").iterdir()]
    suffixes = {".cu", ".cuh", ".h"}
    return [*sorted(file for file in files if file.suffix in suffixes), PLUGINS / C_API]


def rewrite(text: str) -> str:
    """A CUDA source as C++: the same number of lines."""
    text = _DYNAMIC.sub(r"auto* const \2 = static_cast<\1*>(emulator::dynamicShared());", text)
    text = _STATIC.sub(r"auto& \2 = emulator::shared<\1\3>(__LINE__);", text)
    pieces, end = [], 0
    for match in _ASM.finditer(text):
        close = _closing(text, match.end())
        call = _call(text[match.end() : close])
        pieces += [text[end : match.start()], call, "\n" * text.count("\n", match.start(), close)]
        end = close + 1
    return "".join([*pieces, text[end:]])


def _closing(text: str, begin: int) -> int:
    """Where the parenthesis ends that is open at `begin`."""
    for end, character, depth in _outside_strings(text, begin):
        if character == ")" and depth < 0:
            return end
    raise BuildError(f"asm without end: {text[begin : begin + 80]!r}")


def _outside_strings(text: str, begin: int = 0) -> Iterator[tuple[int, str, int]]:
    """Index, character and depth (after it) of everything that is not in a string."""
    depth, in_string = 0, False
    for index in range(begin, len(text)):
        character = text[index]
        if character == '"':
            in_string = not in_string
        elif not in_string:
            depth += (character in "([") - (character in ")]")
            yield index, character, depth


def _split(text: str, at: str) -> list[str]:
    """Parts of a text between the characters `at` that stand in no string and no parenthesis."""
    cuts = [i for i, character, depth in _outside_strings(text) if character == at and depth == 0]
    return [text[i:j] for i, j in zip([0, *(c + 1 for c in cuts)], [*cuts, len(text)], strict=True)]


def _call(statement: str) -> str:
    """An asm statement, without its parentheses, as a call of the instruction's function."""
    template, *lists = _split(statement, ":")
    operands = [
        operand.strip().split("(", 1)[1].rpartition(")")[0]
        for operands in lists[:2]  # outputs and inputs; clobbers follow
        for operand in _split(operands, ",")
        if operand.strip()
    ]
    code = "".join(re.findall(r'"([^"]*)"', template)).strip().rstrip(";")
    if not code:  # of no instruction: for the compiler alone
        return "static_cast<void>(0)"
    if ";" in code:
        raise BuildError(f"asm of more than one instruction: {code!r}")
    instruction, _, arguments = code.partition(" ")
    names = [name for name in re.split(r"[\s,{}\[\]]+", arguments) if name]
    values = [f"({operands[int(name[1:])]})" if name[0] == "%" else name for name in names]
    return f"emulator::ptx::{re.sub(r'[^A-Za-z0-9]+', '_', instruction)}({', '.join(values)})"


def build(
    into: Path,
    kernels: tuple[str, ...],
    *,
    mutation: Mutation | None = None,
    level: int = 1,
    sanitize: bool = False,
) -> Path:
    """Compile kernels and their C functions into one shared library.

    Args:
        into: a folder of its own.
        kernels: beginnings of the names of the sources, as "skinny_linear".
        mutation: a change made to the sources.
        level: of optimisation; what runs briefly is compiled faster with 0.
        sanitize: with address and undefined behaviour sanitizers, for a process that has the
            former's runtime preloaded.

    Raises:
        BuildError: there is no compiler or it refuses a source.
    """
    command = compiler()
    if command is None:
        raise BuildError("no g++ and no clang++")
    units = [SHIM / "machine.cpp"]
    for source in sources():
        name = source.relative_to(PLUGINS)
        text = source.read_text(encoding="utf-8")
        if mutation is not None and str(name) == mutation.file:
            text = mutation.apply(text)
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f'#line 1 "{source}"\n{rewrite(text)}', encoding="utf-8")
        is_wanted = source.stem.startswith(kernels) or source.stem in _ALWAYS
        if str(name) == C_API or (source.suffix == ".cu" and is_wanted):
            units.append(target)
    library = into / "libemulated.so"
    arguments = [
        command,
        *_FLAGS,
        f"-O{level}",
        *(("-g1", *_SANITIZERS) if sanitize else ()),
        *(f"-I{folder}" for folder in (SHIM, into / "kernels", into / "include")),
        *("-x", "c++", *map(str, units)),
        *("-o", str(library)),
    ]
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise BuildError(f"{command}: {done.stderr[-4000:]}")
    return library
