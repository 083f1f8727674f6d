"""Writes `program_format.h`, the opcodes and layouts of programs in C++, from those in Python:

python tools/program_header.py
"""

from types import NoneType
from typing import Any, get_args, get_origin

import torch

from inflight.execution.graph.program import FIELDS, NUM_INPUTS, Opcode, ValueKind
from inflight.execution.kernels import SOURCES

HEADER = SOURCES / "program_format.h"
CPP_TYPES = {int: "int64_t", bool: "bool", float: "double", str: "std::string", torch.dtype: "ScalarType"}


def cpp_header() -> str:
    """The text of `HEADER`."""
    lines = [
        "// Generated from execution/graph/program.py by tools/program_header.py.",
        "#pragma once\n",
        *(f"#include <{name}>" for name in ("cstdint", "optional", "string", "variant", "vector")),
        "\nnamespace inflight {\n",
        "enum class ScalarType : int32_t;\n",
    ]
    for enum in (ValueKind, Opcode):
        names = "".join(f"  k{enum.__name__}{each.name.title().replace('_', '')} = {each.value},\n" for each in enum)
        lines.append(f"enum {enum.__name__} : int64_t {{\n{names}}};")
    lines.append(f"constexpr int kNumOperands[] = {{{', '.join(str(code.num_operands) for code in Opcode)}}};")
    lines.append(f"constexpr int64_t kNumInputs = {NUM_INPUTS};  // the first values of a program")
    lines.append("\nnamespace format {")
    for layout, fields in FIELDS.items():
        declared = "".join(f"  {_cpp_type(kind)} {name};\n" for name, kind in fields.items())
        read = f"  void read(auto& fields) {{ fields({', '.join(fields)}); }}\n"
        lines.append(f"\nstruct {layout.__name__} {{\n{declared}{read}}};")
    lines.append("\n}  // namespace format\n}  // namespace inflight\n")
    return "\n".join(lines)


def _cpp_type(kind: Any) -> str:
    parts = get_args(kind)
    names = [_cpp_type(each) for each in parts if each not in (NoneType, Ellipsis)]
    if get_origin(kind) is tuple:
        return f"std::vector<{names[0]}>"
    if NoneType in parts:
        return f"std::optional<{names[0]}>"
    if names:
        return f"std::variant<{', '.join(names)}>"
    return CPP_TYPES.get(kind) or str(kind.__name__)


if __name__ == "__main__":
    HEADER.write_text(cpp_header(), encoding="utf-8")
