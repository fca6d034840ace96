#!/usr/bin/env python3
"""Compares what hip-sys and rccl-sys declare with AMD's own Python bindings.

    python check_hip_bindings.py [--mutate] DESCRIPTION.json ...

A description is what the examples describe_hip of hip-sys and describe_rccl of rccl-sys print. This Python must have the packages
rocm-bindings-hip, rocm-bindings-libraries and rocm-bindings-systems (scripts/check-bindings.sh sees to that; neither ROCm nor a GPU
is needed). They were generated from ROCm's headers and compiled against them, and are used in two ways:

  their compiled modules   values of constants and enumerators, sizes of structures, and offset and size of every field, found by
                           changing one byte of a structure after another and seeing which of its properties change;
  their Cython text        the fields' types, what handles point to, and every function's name in the library, result, and names
                           and types of its arguments (const included).

With --mutate it is the check that is checked: every name, number and type of the descriptions is changed in turn, and each change
must be noticed.

Exit status: 0 all equal (or noticed), 1 differences, each printed.
"""

import ctypes
import importlib
import json
import re
import sys
from pathlib import Path

MODULES = ["hip", "hipblas", "hipblaslt", "rccl"]
RUST_TYPES = {
    "c_char": "char", "c_int": "int", "c_uint": "unsigned int", "c_void": "void", "f32": "float", "usize": "size_t",
    "u8": "uint8_t", "u32": "uint32_t", "u64": "uint64_t", "i64": "int64_t",
}  # fmt: skip
# AMD's fields of one bit each are one word here, which differs on purpose.
BIT_FIELDS = {"hipDeviceArch_t"}
ENUM_BYTES = 4


def c_type(text):
    """A C type as nested tuples: a name, ("pointer", is the target const, target) or ("array", length, element)."""
    base, *after_stars = text.split("*")
    words = base.split()
    result, is_const = " ".join(word for word in words if word != "const"), "const" in words
    for after in after_stars:
        result = ("pointer", is_const, result)
        is_const = "const" in after.split()
    return result  # a const on the value itself says nothing to the caller


def rust_type(text):
    """The same of a Rust type."""
    text = " ".join(text.split())
    if found := re.fullmatch(r"\*(mut|const) (.*)", text):
        return ("pointer", found[1] == "const", rust_type(found[2]))
    if found := re.fullmatch(r"\[(.*); (\d+)\]", text):
        return ("array", int(found[2]), rust_type(found[1]))
    return RUST_TYPES.get(text, text)


class Amd:
    """AMD's declarations."""

    def __init__(self):
        self.modules = [importlib.import_module(f"rocm.bindings.{name}") for name in MODULES]
        self.typedefs, self.structures, self.functions, self.places = {}, {}, {}, {}
        folder = Path(self.modules[0].__file__).parent
        for name in MODULES:
            self.read((folder / f"cy{name}.pxd").read_text(), (folder / f"cy{name}.pyx").read_text())

    def read(self, declarations, definitions):
        # `cdef struct A "B"` is called B in C.
        for head, body in re.findall(r"^ *(?:cdef|ctypedef) struct ([^\n:]+):\n((?: +[^\n]+\n)+)", declarations, re.M):
            name, _, c_name = head.partition(" ")
            c_name = c_name.strip('"') or name
            self.typedefs.update({name: c_name} if name != c_name else {})
            self.structures[c_name] = (name, [self.field(line) for line in body.splitlines() if line.strip() != "pass"])
        for target, name in re.findall(r"^ *ctypedef (?!struct|enum|union)([^\n(]*?)(\w+)$", declarations, re.M):
            if c_type(target) != name:
                self.typedefs[name] = c_type(target)
        symbols = dict(re.findall(r'__init_symbol\(&_(\w+)__funptr,"(\w+)"\)', definitions))
        for result, name, arguments in re.findall(r"^cdef ([^\n]*?)(\w+)\(([^\n]*)\) (?:except\? \w+|noexcept) nogil$", declarations, re.M):
            if name in symbols:
                split = [re.fullmatch(r"(.*?)(\w+)", argument.strip()).groups() for argument in arguments.split(",") if argument]
                self.functions[symbols[name]] = (c_type(result), [(kind, c_type(text)) for text, kind in split])

    @staticmethod
    def field(line):
        text, name, length = re.fullmatch(r" *(.*?)(\w+)(?:\[(\d+)\])?", line).groups()
        return name, ("array", int(length), c_type(text)) if length else c_type(text)

    def resolved(self, kind):
        """`kind` without typedefs."""
        if isinstance(kind, tuple):
            return (*kind[:2], self.resolved(kind[2]))
        return self.resolved(self.typedefs[kind]) if kind in self.typedefs else kind

    def find(self, name):
        """What the compiled modules have under this name."""
        return next((getattr(module, name) for module in self.modules if hasattr(module, name)), None)


def probe(structure, fields):
    """{field: (offset, size)} of a structure of a compiled module, in bytes; None in place of what is not found."""
    base, size = int(structure), structure.c_sizeof()
    memory = (ctypes.c_uint8 * size).from_address(base)
    ctypes.memset(base, 0, size)
    pointers = [name for name, kind in fields if isinstance(kind, tuple) and kind[0] == "pointer"]

    def value(name):
        try:
            got = getattr(structure, name)
        except ValueError as error:  # no enumerator has this value
            return str(error)
        return list(got) if isinstance(got, (list, bytes)) else repr(got)

    def changed(names, step, write, rest):
        """Writes to every `step`th byte; where each of the names changed."""
        rest()
        before = {name: value(name) for name in names}
        where = {name: [] for name in names}
        for offset in range(0, size - step + 1, step):
            write(offset)
            for name in names:
                if value(name) != before[name]:
                    where[name].append(offset)
            rest()
        return where

    nested, plain = {}, []
    for name, _ in fields:
        if name in pointers:
            continue
        got = getattr(structure, name)
        if hasattr(got, "c_sizeof"):
            nested[name] = (int(got) - base, got.c_sizeof())
        else:
            plain.append(name)
    texts = {name: kind[1] for name, kind in fields if name in plain and isinstance(getattr(structure, name), str)}

    def put(offset):
        memory[offset] = 1

    where = changed(plain, 1, put, lambda: ctypes.memset(base, 0, size))
    found = dict(nested)
    for name, offsets in where.items():
        whole = offsets == list(range(offsets[0], offsets[-1] + 1)) if offsets else False
        # A text ends at its first zero byte, so that only its beginning shows; its length is that of the declaration.
        found[name] = (offsets[0], texts.get(name, len(offsets))) if whole else None

    # Properties that are pointers may be followed: all slots point to something.
    targets = [ctypes.create_string_buffer(text, 16) for text in (b"a", b"b")]
    slots = (ctypes.c_uint64 * (size // 8)).from_address(base)

    def point(offset):
        slots[offset // 8] = ctypes.addressof(targets[1])

    def unpoint():
        for index in range(len(slots)):
            slots[index] = ctypes.addressof(targets[0])

    for name, offsets in changed(pointers, 8, point, unpoint).items() if pointers else ():
        found[name] = (offsets[0], 8) if len(offsets) == 1 else None
    ctypes.memset(base, 0, size)
    return found


def check_constants(amd, interface):
    for constant in interface["constants"]:
        theirs = amd.find(constant["name"])
        if not isinstance(theirs, int):
            yield f"{constant['name']}: AMD has no such constant"
        elif (theirs ^ constant["value"]) & 0xFFFFFFFF:
            yield f"{constant['name']}: {constant['value']} here, AMD's is {theirs}"


def check_enumerations(amd, interface):
    for enumeration in interface["enumerations"]:
        name, theirs = enumeration["name"], amd.find(enumeration["name"])
        if theirs is None:
            yield f"{name}: AMD has no such enumeration"
            continue
        members = {key: int(member) for key, member in theirs.__members__.items()}
        # C keeps an enumeration whose values fit an int (or an unsigned int) in as many bytes.
        if enumeration["size"] != ENUM_BYTES or not all(-(2**31) <= member < 2**32 for member in members.values()):
            yield f"{name}: {enumeration['size']} bytes here, but AMD's values do not fit or need {ENUM_BYTES}"
        for constant in enumeration["constants"]:
            if members.get(constant["name"]) != constant["value"]:
                yield f"{name}.{constant['name']}: {constant['value']} here, AMD's is {members.get(constant['name'])}"


def check_structures(amd, interface):
    for ours in interface["structures"]:
        c_name = amd.resolved(ours["name"])
        if c_name not in amd.structures:
            yield f"{ours['name']}: AMD has no such structure"
            continue
        name, fields = amd.structures[c_name]
        compiled = amd.find(name)()
        if ours["size"] != compiled.c_sizeof():
            yield f"{ours['name']}: {ours['size']} bytes here, AMD's has {compiled.c_sizeof()}"
        if ours["name"] in BIT_FIELDS:
            continue
        if [field["name"] for field in ours["fields"]] != [field for field, _ in fields]:
            yield f"{ours['name']}: other fields than AMD's, which are {[field for field, _ in fields]}"
            continue
        if c_name not in amd.places:
            amd.places[c_name] = probe(compiled, fields)
        places = amd.places[c_name]
        for field, (_, theirs) in zip(ours["fields"], fields):
            label = f"{ours['name']}.{field['name']}"
            if amd.resolved(rust_type(field["kind"])) != amd.resolved(theirs):
                yield f"{label}: {field['kind']} here, AMD's is {theirs}"
            place = places[field["name"]]
            if (field["offset"], field["size"]) != place:
                yield f"{label}: {field['size']} bytes at {field['offset']} here, AMD's (offset, size) is {place}"


def check_aliases(amd, interface):
    for alias in interface["aliases"]:
        name, ours = alias["name"], rust_type(alias["kind"])
        if name not in amd.typedefs or amd.resolved(name) != amd.resolved(ours):
            yield f"{name}: {alias['kind']} here, AMD's is {amd.typedefs.get(name)}"


def check_functions(amd, interface):
    for function in interface["functions"]:
        name = function["name"]
        if name not in amd.functions:
            yield f"{name}: AMD has no such function"
            continue
        result, arguments = amd.functions[name]
        if amd.resolved(rust_type(function["result"])) != amd.resolved(result):
            yield f"{name}: returns {function['result']} here, AMD's returns {result}"
        if len(arguments) != len(function["arguments"]):
            yield f"{name}: {len(function['arguments'])} arguments here, AMD's has {len(arguments)}"
        for ours, (argument, kind) in zip(function["arguments"], arguments):
            if ours["name"].removeprefix("r#") != argument:
                yield f"{name}: argument {ours['name']} here, AMD's is {argument}"
            if amd.resolved(rust_type(ours["kind"])) != amd.resolved(kind):
                yield f"{name}({argument}): {ours['kind']} here, AMD's is {kind}"


CHECKS = {
    "constants": check_constants,
    "enumerations": check_enumerations,
    "structures": check_structures,
    "aliases": check_aliases,
    "functions": check_functions,
}
PARTS = [("enumerations", "constants", "enumerators"), ("structures", "fields", "fields"), ("functions", "arguments", "arguments")]


def mutations(node):
    """Changes each name, number and type within `node`, one at a time, and yields what was changed."""
    for key, value in list(node.items()) if isinstance(node, dict) else list(enumerate(node)):
        if isinstance(value, (dict, list)):
            yield from mutations(value)
        elif key in ("library", "optional", "align"):  # not AMD's
            continue
        else:
            if key in ("kind", "result"):
                swaps = {"*mut": "*const", "*const": "*mut", "c_int": "c_uint", "c_uint": "c_int", "u64": "i64", "i64": "u64", "256": "255"}
                found = next((old for old in swaps if old in value), None)
                node[key] = value.replace(found, swaps[found], 1) if found else "f64"
            else:
                node[key] = value + 1 if isinstance(value, int) else value + "_x"
            yield f"{key} {value!r} -> {node[key]!r}"
            node[key] = value


def mutate(amd, interface):
    """Counts the changes that the check notices, and prints the others."""
    noticed, missed = 0, []
    for what, check in CHECKS.items():
        for item in interface[what]:
            # Bit fields are one word here: there is nothing to compare but the whole.
            within = [item] if item["name"] not in BIT_FIELDS else []
            for change in (change for part in within for change in mutations(part)):
                if any(True for _ in check(amd, {what: [item]})):
                    noticed += 1
                else:
                    missed.append(f"{what}: {change}")
    return noticed, missed


def main():
    arguments = sys.argv[1:]
    if not [argument for argument in arguments if argument != "--mutate"]:
        sys.exit(__doc__)
    amd, bad = Amd(), 0
    files = [Path(argument) for argument in arguments if argument != "--mutate"]
    for interface in [interface for file in files for interface in json.loads(file.read_text())]:
        library = interface["library"]
        if not interface["functions"] or not interface["enumerations"]:
            sys.exit(f"{library}: the description is empty, so nothing can be compared")
        if "--mutate" in arguments:
            noticed, problems = mutate(amd, interface)
            summary = f"{noticed} of {noticed + len(problems)} changes noticed"
        else:
            problems = [problem for what, check in CHECKS.items() for problem in check(amd, interface)]
            counts = {what: len(interface[what]) for what in CHECKS}
            for what, part, name in PARTS:
                counts[name] = sum(len(item[part]) for item in interface[what])
            summary = ", ".join(f"{count} {what}" for what, count in counts.items())
        print(f"{'FAILED' if problems else 'ok'}: {library}: {summary}")
        for problem in problems:
            print(f"  {problem}")
        bad += len(problems)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
