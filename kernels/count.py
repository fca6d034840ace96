#!/usr/bin/env python3
"""Counts what the inner loops of kernels ask of each pipe of a compute unit, from the disassembly. Computed, not measured.

    kernels/count.py FOLDER [--arch gfx942] [--kernel PART OF A NAME] [--least SHARE]

FOLDER holds NAME.ARCH.co as build.sh makes them. For each kernel with matrix instructions: the innermost loop that has the most of
them. One line: instructions of each pipe, and the cycles that one turn of the loop keeps the pipe busy, for each wave. LDS and
memory serve the four SIMDs of a compute unit, the matrix and vector pipes one each; so with waves spread evenly LDS and memory
count four times. `MFMA/max` is the share of the matrix pipe's cycles of the busiest pipe's: the bound that counting gives.

Where the numbers come from:
  MFMA     passes of four cycles, from LLVM 19's scheduling model (llvm-mca -mcpu=gfx942 prints 4 for v_mfma_f32_16x16x16_bf16, 8 with
           gfx90a), which agree with the peaks: 1307 TFLOP/s = 304 CU x 4 SIMD x 2.1 GHz x 8192 FLOP / 16 cycles.
  VALU     64 lanes on 16: 4 cycles; exp, log, rcp, rsq, sqrt, sin, cos and 32-bit integer products: 16 (a quarter of the rate).
  LDS      128 bytes a cycle for a compute unit (CDNA 3 ISA guide: 32 banks of 4 bytes), so 8 cycles for 16 bytes a lane; no bank
           conflicts: kernels permute or pad for that.
  memory   the vector cache gives 64 bytes a cycle, the second-level cache 2048 for the 38 compute units of a chiplet (CDNA 3 white
           paper): 53.9 bytes, so 19 cycles for 16 bytes a lane. What misses it is not counted.
"""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys

MFMA_CYCLES = {
    "gfx942": {"16x16x16": 16, "32x32x8": 32, "16x16x4_f32": 32, "32x32x2_f32": 64},
    "gfx90a": {"16x16x16": 32, "32x32x8": 64, "16x16x4f32": 32, "32x32x2f32": 64},
    "gfx950": {"16x16x16": 16, "32x32x8": 32, "16x16x32": 32, "32x32x16": 64},
}
SLOW = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_", "v_mul_lo_u32", "v_mul_hi_")
CACHE_BYTES = 2048 / 38
LDS_BYTES = 128
LANES = 64
PIPES = ("MFMA", "VALU", "LDS", "memory")


def width(name):
    """Bytes a lane that an access moves."""
    for text, size in (("x4", 16), ("b128", 16), ("x3", 12), ("b96", 12), ("x2", 8), ("b64", 8), ("short", 2), ("b16", 2), ("ubyte", 1), ("b8", 1)):
        if text in name:
            return size * (2 if "read2" in name or "write2" in name else 1)
    return 4 * (2 if "read2" in name or "write2" in name else 1)


def classify(name, arch):
    """Pipe and cycles of an instruction, or None."""
    if name.startswith("v_mfma"):
        for shape, cycles in MFMA_CYCLES[arch].items():
            if shape in name:
                return "MFMA", cycles
        sys.exit(f"error: no cycles are known for {name} on {arch}; add it to MFMA_CYCLES")
    if name.startswith("ds_"):
        return "LDS", LANES * width(name) / LDS_BYTES
    if name.startswith(("global_", "buffer_", "flat_")):
        return "memory", LANES * width(name) / CACHE_BYTES
    if name.startswith("v_"):
        return "VALU", 16 if name.startswith(SLOW) else 4
    return None


def kernels(objdump, path):
    """Name and instructions [(address, mnemonic, target or None)] of each function."""
    text = subprocess.run([objdump, "-d", str(path)], capture_output=True, text=True, check=True).stdout
    name, code = None, []
    for line in text.splitlines():
        head = re.match(r"^([0-9a-f]+) <(.+)>:$", line)
        if head:
            if name:
                yield name, code
            name, code, start = head[2], [], int(head[1], 16)
            continue
        found = re.match(r"^\s+(\S+)(.*)//\s*([0-9A-F]+):", line)
        if not found or name is None:
            continue
        target = None
        if found[1].startswith(("s_cbranch", "s_branch")):
            place = re.search(r"<[^>]*?(?:\+0x([0-9a-f]+))?>\s*$", line)
            target = start + int(place[1] or "0", 16) if place else None
        code.append((int(found[3], 16), found[1], target))
    if name:
        yield name, code


def inner_loop(code):
    """The loop with the most matrix instructions among those that contain no other loop with any; None without."""
    loops = {(target, at) for at, _, target in code if target is not None and target <= at}
    mfmas = lambda loop: sum(n.startswith("v_mfma") for a, n, _ in code if loop[0] <= a <= loop[1])
    loops = [loop for loop in loops if mfmas(loop)]
    inner = [l for l in loops if not any(o != l and l[0] <= o[0] and o[1] <= l[1] for o in loops)]
    if not inner:
        return None
    # Of equal ones the one that reads memory most: the copy for odd shapes is not the one to judge.
    reads = lambda loop: sum(n.startswith("global_load_dwordx4") for a, n, _ in code if loop[0] <= a <= loop[1])
    best = max(inner, key=lambda l: (mfmas(l), reads(l), -l[0]))
    return [n for a, n, _ in code if best[0] <= a <= best[1]]


def find_objdump():
    found = next((p for p in map(shutil.which, ("llvm-objdump-19", "llvm-objdump-22", "llvm-objdump")) if p), None)
    return found or sys.exit("error: no llvm-objdump; on Debian: apt install llvm-19")


def inner_loops(folder, arch):
    """Name, instructions and cycles by pipe, and the matrix pipe's share, of the inner loop of each kernel that multiplies matrices."""
    files = sorted(folder.glob(f"*.{arch}.co"))
    if not files:
        sys.exit(f"error: no *.{arch}.co in {folder}; kernels/build.sh makes them")
    objdump = find_objdump()
    for path in files:
        for name, code in kernels(objdump, path):
            loop = inner_loop(code)
            if loop is None:
                continue
            count, cycles = dict.fromkeys(PIPES, 0), dict.fromkeys(PIPES, 0.0)
            for mnemonic in loop:
                what = classify(mnemonic, arch)
                if what:
                    count[what[0]] += 1
                    cycles[what[0]] += what[1] * (4 if what[0] in ("LDS", "memory") else 1)
            yield name, count, cycles, cycles["MFMA"] / max(cycles.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--arch", default="gfx942", choices=sorted(MFMA_CYCLES))
    parser.add_argument("--kernel", default="")
    parser.add_argument("--least", type=float, default=0.0, help="fail when a loop's MFMA/max is below this")
    options = parser.parse_args()
    print(f"{'kernel':34}" + "".join(f"{p:>8} n{'cycles':>7}" for p in PIPES) + "  MFMA/max")
    low = []
    for name, count, cycles, share in inner_loops(options.folder, options.arch):
        if options.kernel not in name:
            continue
        if share < options.least:
            low.append(name)
        print(f"{name:34}" + "".join(f"{count[p]:>10}{cycles[p]:>7.0f}" for p in PIPES) + f"{share:>10.2f}")
    if low:
        sys.exit(f"error: below {options.least}: {', '.join(low)}")


if __name__ == "__main__":
    main()
