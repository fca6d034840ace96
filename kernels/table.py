#!/usr/bin/env python3
"""Writes the tables of docs/KERNELS.md: what each kernel asks of an MI300X at ZAYA1-8B's shapes. Computed, not measured.

    kernels/table.py --swgpu LIBRARY --objects FOLDER [--family NAME] [--write]     runs the kernels on the software GPU; minutes
    kernels/table.py --check                                                        whether the page is of these sources; no tools

`make kernel-table` builds what is needed and writes the page. kernels/launches.py lists the launches, kernels/count.py says what an
instruction costs each pipe of a compute unit.
"""
import argparse
import ctypes
import hashlib
import json
import os
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "KERNELS.md"

# MI300X: compute units, SIMDs of each, cycles a second at the peak clock, bytes a second of its HBM (CDNA 3 white paper).
UNITS, SIMDS, CLOCK, HBM = 304, 4, 2.1e9, 5.3e12
PIPES = ("MFMA", "VALU", "LDS", "L2", "HBM")
CLASSES = ("mfma", "valu", "salu", "lds", "vmem", "smem", "control")
# What the project aims at: the matrix pipe's cycles of the busiest pipe's; bytes past the caches over the least possible.
LEAST_SHARE, MOST_BYTES = 0.8, 1.2


def sources():
    """The kernels' sources that the counts depend on, as one hash."""
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("*.zk.cpp"), *HERE.glob("*.h"), *HERE.glob("zk/*.h"), HERE / "launches.py", HERE / "count.py", HERE / "table.py"]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class Device:
    """The software GPU: memory, launches, counters."""

    def __init__(self, library, objects):
        sys.path.append(str(HERE / "test"))
        from matrix_device import Hip
        self.hip = Hip(library, objects, "gfx942")
        self.lib = self.hip.lib

    def function(self, kernel):
        """The kernel, of the one code object whose symbols name it: asking the others would be an error that the device tells of."""
        if kernel not in self.hip.functions:
            module = next((m for image, m in self.hip.modules if f"\0{kernel}.kd\0".encode() in image), None)
            if module is None:
                sys.exit(f"error: no code object has {kernel}; build them anew with kernels/build.sh")
            function = ctypes.c_void_p()
            self.hip.check(self.lib.hipModuleGetFunction(ctypes.byref(function), module, kernel.encode()), kernel)
            self.hip.functions[kernel] = function
        return self.hip.functions[kernel]

    def place(self, array):
        if array.pointer is None:
            array.pointer = ctypes.c_void_p()
            self.hip.check(self.lib.hipMalloc(ctypes.byref(array.pointer), ctypes.c_size_t(max(array.bytes, 16))), "hipMalloc")
            if array.contents is not None:
                self.hip.check(self.lib.hipMemcpy(array.pointer, ctypes.c_void_p(array.contents.ctypes.data), ctypes.c_size_t(array.bytes), 1), "hipMemcpy")
        return array.pointer

    def argument(self, value):
        from launches import Long, Use
        if value is None:
            return ctypes.c_void_p(None)
        if isinstance(value, Use):
            return ctypes.c_void_p(self.place(value.array).value)
        if isinstance(value, float):
            return ctypes.c_float(value)
        return ctypes.c_long(value) if isinstance(value, Long) else ctypes.c_int(value)

    def run(self, launch):
        """Counters of the launch."""
        kept = [self.argument(a) for a in launch.args]
        pointers = (ctypes.c_void_p * len(kept))(*[ctypes.cast(ctypes.pointer(k), ctypes.c_void_p) for k in kept])
        grid = (*launch.grid, 1, 1)[:3]
        what = f"{launch.kernel} ({launch.shape})"
        self.hip.check(self.lib.hipModuleLaunchKernel(self.function(launch.kernel), *grid, launch.items, 1, 1, 0, None, pointers, None), what)
        self.hip.check(self.lib.hipDeviceSynchronize(), what)
        text = ctypes.create_string_buffer(1 << 16)
        self.lib.swgpuTakeCounters.restype = ctypes.c_size_t
        length = self.lib.swgpuTakeCounters(text, ctypes.c_size_t(len(text)))
        return json.loads(text.raw[:length])[launch.kernel]


class Row:
    """What all launches of one kernel at one shape come to on the whole device."""

    def __init__(self, launch):
        self.kernel, self.shape = launch.kernel, launch.shape
        self.flop = self.least = self.asked = self.moved = 0.0
        self.instructions = dict.fromkeys(CLASSES, 0.0)
        self.cycles = dict.fromkeys(PIPES, 0.0)
        self.whole = launch.whole()

    def add(self, launch, counts):
        from count import classify
        self.flop += launch.flop
        self.least += launch.least_bytes()
        self.asked += launch.times * (counts["bytes_read"] + counts["bytes_written"])
        self.moved += launch.moved_bytes(counts["memory_bytes_read"] + counts["memory_bytes_written"])
        for name in CLASSES:
            self.instructions[name] += launch.times * counts[name]
        for mnemonic, n in counts["mnemonics"].items():
            pipe, cycles = classify(mnemonic, "gfx942") or (None, 0)
            if pipe:
                pipe, units = ("L2", UNITS) if pipe == "memory" else (pipe, UNITS if pipe == "LDS" else UNITS * SIMDS)
                self.cycles[pipe] += launch.times * n * cycles / units

    def finish(self):
        self.cycles["HBM"] = (self.moved if self.whole else self.least) * CLOCK / HBM
        return self

    def bound(self):
        return max(PIPES, key=lambda p: self.cycles[p])

    def share(self):
        """The matrix pipe's cycles of those of the busiest pipe of a compute unit; None where nothing is multiplied."""
        inside = [self.cycles[p] for p in PIPES[:4]]
        return self.cycles["MFMA"] / max(inside) if self.cycles["MFMA"] else None

    def misses(self):
        """Which of the project's targets it misses; None or a text."""
        if self.cycles["MFMA"] and self.bound() != "HBM":
            return f"MFMA {self.share():.2f} of {self.bound()}" if self.share() < LEAST_SHARE else None
        if self.whole and self.bound() == "HBM" and self.moved > MOST_BYTES * self.least:
            return f"{self.moved / self.least:.2f} of the least bytes"
        return None


def number(x):
    """Three digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def write_rows(rows):
    head = ["kernel", "works on", "GFLOP", "least MB", "FLOP a byte", "asked", "moved", "MFMA", "VALU", "SALU", "LDS", "mem.", "other",
            *[f"{p} kcycles" for p in PIPES], "bound", "us", "MFMA share"]
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for r in rows:
        total = sum(r.instructions.values())
        mix = [r.instructions["mfma"], r.instructions["valu"], r.instructions["salu"], r.instructions["lds"], r.instructions["vmem"],
               r.instructions["smem"] + r.instructions["control"]]
        cells = [r.kernel, r.shape, number(r.flop / 1e9), number(r.least / 1e6), number(r.flop / r.least), number(r.asked / r.least),
                 number(r.moved / r.least) if r.whole else "", *[f"{100 * m / total:.0f}" for m in mix],
                 *[number(r.cycles[p] / 1e3) for p in PIPES], r.bound(), number(max(r.cycles.values()) / CLOCK * 1e6),
                 "" if r.share() is None else f"{r.share():.2f}"]
        yield "| " + " | ".join(cells) + " |"


def write_loops(objects):
    from count import PIPES as OF_LOOP, inner_loops
    yield "| kernel | " + " | ".join(f"{p} | cycles" for p in OF_LOOP) + " | MFMA share |"
    yield "|" + "---|" * (2 * len(OF_LOOP) + 2)
    for name, count, cycles, share in inner_loops(objects, "gfx942"):
        yield f"| {name} | " + " | ".join(f"{count[p]} | {cycles[p]:.0f}" for p in OF_LOOP) + f" | {share:.2f} |"


def put(page, mark, lines):
    """The page with what stands between two marks replaced."""
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    before, rest = page.split(begin)
    return before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.split(end)[1]


def check():
    page = PAGE.read_text()
    names = set()
    for path in HERE.glob("*.zk.cpp"):
        names |= set(re.findall(r"^ZK_KERNEL(?:_WAVES)?\((?:\d+, )?(\w+),", path.read_text(), re.M))
    # Names that a macro makes have a suffix; their whole names are the launches' business.
    absent = sorted(n for n in names if n not in page and n != "name")
    found = re.search(r"<!-- sources (\w+) -->", page)
    if absent:
        sys.exit(f"error: docs/KERNELS.md does not speak of {', '.join(absent)}; add them to kernels/launches.py and run `make kernel-table`")
    if not found or found[1] != sources():
        sys.exit("error: the tables of docs/KERNELS.md are of other sources than these; run `make kernel-table`")
    print("docs/KERNELS.md: tables of these sources")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swgpu", help="the software GPU's library")
    parser.add_argument("--objects", type=pathlib.Path, help="folder of code objects")
    parser.add_argument("--family", default="", help="only the families whose names hold this")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/KERNELS.md")
    parser.add_argument("--check", action="store_true", help="only say whether docs/KERNELS.md is of these sources")
    options = parser.parse_args()
    if options.check:
        return check()
    if not options.swgpu or not options.objects:
        parser.error("--swgpu and --objects are needed, or --check")
    # The launches' operands hold whatever was there; memory beyond the host's is never touched.
    os.environ |= {"SWGPU_DETAILS": "1", "SWGPU_POISON": "off", "SWGPU_MEMORY_MIB": str(128 << 10)}
    from launches import FAMILIES
    device, families, missed = Device(options.swgpu, options.objects), {}, []
    for family, launches in FAMILIES.items():
        if options.family not in family:
            continue
        rows = {}
        for launch in launches():
            print(f"{family}: {launch.kernel}", file=sys.stderr)
            rows.setdefault((launch.kernel, launch.shape), Row(launch)).add(launch, device.run(launch))
        families[family] = [row.finish() for row in rows.values()]
        missed += [(row, row.misses()) for row in families[family] if row.misses()]
    tables = []
    for family, rows in families.items():
        tables += ["", f"### {family}", "", *write_rows(rows)]
    misses = [f"* `{row.kernel}` ({row.shape}): {why}." for row, why in missed] or ["None."]
    loops = list(write_loops(options.objects))
    if not options.write:
        print("\n".join([*tables, "", *misses, "", *loops]))
        return
    page = PAGE.read_text()
    for mark, lines in (("launches", tables), ("misses", misses), ("loops", loops)):
        page = put(page, mark, lines)
    PAGE.write_text(re.sub(r"<!-- sources \w* -->", f"<!-- sources {sources()} -->", page))


main()
