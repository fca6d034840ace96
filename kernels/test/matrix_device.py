"""Runs kernels for the tests of the matrix kernels: on the fiber build, or on a HIP library with code objects.

    python3 test_gemm.py --cpu libkernels.so
    python3 test_gemm.py --hip libswgpu.so --objects DIR --arch gfx942
    python3 test_gemm.py --hip libswgpu.so --objects DIR --cpu libkernels.so      both, every launch compared bit by bit

Arrays are numpy arrays; a kernel's pointer arguments are read and written in place.
"""
import argparse
import ctypes
import pathlib
import sys

import numpy as np


def to_bf16(x):
    """Rounds to the nearest bfloat16, ties to even. Returns bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(x):
    """The bfloat16 nearest to x, as float32."""
    return from_bf16(to_bf16(x))


class Float(float):
    """A float argument; whole numbers are int, `Long` is 64 bits."""


class Long(int):
    pass


def scalar(value):
    if isinstance(value, Long):
        return ctypes.c_long(value)
    if isinstance(value, (int, np.integer)):
        return ctypes.c_int(int(value))
    return ctypes.c_float(float(value))


class Fibers:
    """The kernels compiled for the host, one fiber a work-item."""

    name = "fibers"

    def __init__(self, library):
        self.lib = ctypes.CDLL(library)
        self.lib.zk_cpu_error.restype = ctypes.c_char_p

    def launch(self, kernel, grid, *args, block=256):
        kept = [ctypes.c_void_p(a.ctypes.data if isinstance(a, np.ndarray) else None) if a is None or isinstance(a, np.ndarray) else scalar(a)
                for a in args]
        pointers = (ctypes.c_void_p * len(kept))(*[ctypes.cast(ctypes.pointer(k), ctypes.c_void_p) for k in kept])
        grid = tuple(grid) + (1,) * (3 - len(grid))
        self.lib.zk_cpu_allow_none()
        for a in args:
            if isinstance(a, np.ndarray):
                self.lib.zk_cpu_allow(ctypes.c_void_p(a.ctypes.data), ctypes.c_size_t(a.nbytes))
        # The launch reads its arguments as the kernel's work-items do.
        for a in [*kept, pointers]:
            self.lib.zk_cpu_allow(ctypes.c_void_p(ctypes.addressof(a)), ctypes.c_size_t(ctypes.sizeof(a)))
        if self.lib.zk_cpu_launch(kernel.encode(), *grid, block, pointers):
            raise RuntimeError(f"{kernel}: {self.lib.zk_cpu_error().decode()}")

    def set_order(self, order):
        """0 forward, 1 backward, 2 random: the order in which waves and work-items get their turn."""
        self.lib.zk_cpu_set_order(order)


class Hip:
    """Code objects on a HIP library. Every launch copies its arrays there and back."""

    name = "hip"

    def __init__(self, library, objects, arch):
        self.lib = ctypes.CDLL(library)
        self.functions = {}
        self.modules = []
        self.check(self.lib.hipInit(0), "hipInit")
        self.check(self.lib.hipSetDevice(0), "hipSetDevice")
        for path in sorted(pathlib.Path(objects).glob(f"*{arch}*")):
            if path.suffix not in (".co", ".hsaco", ".o"):
                continue
            image = path.read_bytes()
            module = ctypes.c_void_p()
            self.check(self.lib.hipModuleLoadData(ctypes.byref(module), image), f"loading {path}")
            self.modules.append((image, module))

    def check(self, status, what):
        if status:
            self.lib.hipGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"{what}: {self.lib.hipGetErrorString(status)} ({status})")

    def function(self, kernel):
        if kernel not in self.functions:
            for _, module in self.modules:
                f = ctypes.c_void_p()
                if self.lib.hipModuleGetFunction(ctypes.byref(f), module, kernel.encode()) == 0:
                    self.functions[kernel] = f
                    break
            else:
                raise RuntimeError(f"no code object has {kernel}")
        return self.functions[kernel]

    def launch(self, kernel, grid, *args, block=256):
        device, kept = {}, []
        for a in args:
            if isinstance(a, np.ndarray):
                base = a.ctypes.data
                if base not in device:
                    p = ctypes.c_void_p()
                    self.check(self.lib.hipMalloc(ctypes.byref(p), ctypes.c_size_t(max(a.nbytes, 16))), "hipMalloc")
                    self.check(self.lib.hipMemcpy(p, ctypes.c_void_p(base), ctypes.c_size_t(a.nbytes), 1), "hipMemcpy")
                    device[base] = (p, a)
                kept.append(ctypes.c_void_p(device[base][0].value))
            elif a is None:
                kept.append(ctypes.c_void_p(None))
            else:
                kept.append(scalar(a))
        pointers = (ctypes.c_void_p * len(kept))(*[ctypes.cast(ctypes.pointer(k), ctypes.c_void_p) for k in kept])
        grid = tuple(grid) + (1,) * (3 - len(grid))
        self.check(self.lib.hipModuleLaunchKernel(self.function(kernel), *grid, block, 1, 1, 0, None, pointers, None), kernel)
        self.check(self.lib.hipDeviceSynchronize(), f"{kernel} (synchronize)")
        for p, a in device.values():
            self.check(self.lib.hipMemcpy(ctypes.c_void_p(a.ctypes.data), p, ctypes.c_size_t(a.nbytes), 2), "hipMemcpy")
            self.check(self.lib.hipFree(p), "hipFree")

    def set_order(self, order):
        pass


class Both:
    """Every launch on both, with the same input. The results go on from the code objects."""

    name = "hip, compared with fibers"

    def __init__(self, hip, fibers):
        self.hip, self.fibers, self.kernels = hip, fibers, {}

    def launch(self, kernel, grid, *args, block=256):
        copies = {}
        for a in args:
            if isinstance(a, np.ndarray):
                copies.setdefault(a.ctypes.data, put(a))
        self.fibers.launch(kernel, grid, *[copies[a.ctypes.data] if isinstance(a, np.ndarray) else a for a in args], block=block)
        self.hip.launch(kernel, grid, *args, block=block)
        launches, different = self.kernels.get(kernel, (0, 0.0))
        for a in args:
            if isinstance(a, np.ndarray) and a.tobytes() != copies[a.ctypes.data].tobytes():
                x, y = [from_bf16(v) if v.dtype == np.uint16 else v for v in (a, copies[a.ctypes.data])]
                with np.errstate(invalid="ignore"):
                    scale = np.nanmax(np.abs(np.asarray(y, np.float64)))
                    different = max(different, float(np.nanmax(np.abs(np.asarray(x, np.float64) - y)) / scale))
        self.kernels[kernel] = (launches + 1, different)

    def set_order(self, order):
        self.fibers.set_order(order)


def from_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", help="library of the fiber build")
    parser.add_argument("--hip", help="HIP library")
    parser.add_argument("--objects", help="folder of code objects")
    parser.add_argument("--arch", default="gfx942")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    options = parser.parse_args()
    if options.hip and options.cpu:
        device = Both(Hip(options.hip, options.objects, options.arch), Fibers(options.cpu))
    elif options.hip:
        device = Hip(options.hip, options.objects, options.arch)
    elif options.cpu:
        device = Fibers(options.cpu)
    else:
        parser.error("--cpu or --hip is needed")
    device.quick = options.quick
    return device


def aligned(shape, dtype, fill=None):
    """An array whose first number lies at a multiple of 64 bytes, as the arena's do. NaN where nothing is said."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    at = -raw.ctypes.data % 64
    out = raw[at:at + size].view(dtype).reshape(shape)
    if fill is not None:
        out[...] = fill
    elif size:
        out.view(np.uint8)[...] = 0xFF
    return out


def put(x, dtype=None):
    x = np.asarray(x)
    out = aligned(x.shape, dtype or x.dtype)
    out[...] = x
    return out


worst = {}


def close(what, got, want, bound):
    """Fails unless |got - want| <= bound everywhere; bound is an array or a number."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, not {want.shape}"
    if got.size == 0:
        return
    error = np.abs(got - want)
    ratio = np.where(np.isfinite(got), error / np.maximum(bound, 1e-300), np.inf)
    at = np.unravel_index(np.argmax(ratio), ratio.shape)
    name = what.split(" ")[0]
    worst[name] = max(worst.get(name, 0.0), float(ratio[at]))
    assert ratio[at] <= 1.0, f"{what}: at {at} got {got[at]}, expected {want[at]}, {ratio[at]:.3g} times the bound"


def same(what, got, want):
    assert np.array_equal(got, want), f"{what}: {np.argwhere(np.asarray(got) != np.asarray(want))[:4].tolist()} differ"


def report(device):
    for name, ratio in sorted(worst.items()):
        print(f"  {name:34s} largest error {ratio:8.3g} of its bound")
    for kernel, (launches, different) in sorted(getattr(device, "kernels", {}).items()):
        print(f"  {kernel:34s} {launches:5} launches, " + (f"differ by {different:.2g} of the largest" if different else "the same bits"))
    print(f"{pathlib.Path(sys.argv[0]).name}: passed on {device.name}")
