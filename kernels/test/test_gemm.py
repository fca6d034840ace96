"""gemm_* against numpy in double precision, on shapes that do and do not fill tiles."""
import itertools

import numpy as np

from matrix_device import aligned, close, from_arguments, from_bf16, put, report, rounded, same, to_bf16

TILE = {"bf16": 128, "f32": 64}


def gemm(device, layout, operand, result, a, b, c, m, n, k, splits, accumulate):
    tile = TILE[operand]
    parts = aligned((splits, m, n), np.float32) if splits > 1 else None
    lda, ldb = (m if layout[0] == "t" else k), (k if layout[1] == "t" else n)
    tiles = -(-m // tile) * -(-n // tile)
    device.launch(f"gemm_{layout}_{operand}_{result}", (tiles, splits), a, b, c, parts, m, n, k, lda, ldb, n, splits, accumulate)
    if splits > 1:
        device.launch(f"gemm_reduce_{result}", (-(-m * (-(-n // 4)) // 256),), parts, c, m, n, n, splits, accumulate)


def check(device, rng, layout, operand, result, m, n, k, splits, accumulate):
    a = rng.standard_normal((k, m) if layout[0] == "t" else (m, k)).astype(np.float32)
    b = rng.standard_normal((n, k) if layout[1] == "t" else (k, n)).astype(np.float32)
    old = rng.standard_normal((m, n)).astype(np.float32)
    if operand == "bf16":
        a, b = rounded(a), rounded(b)
    if result == "bf16":
        old = rounded(old)
    left = (a.T if layout[0] == "t" else a).astype(np.float64)
    right = (b.T if layout[1] == "t" else b).astype(np.float64)
    want = left @ right + (old if accumulate else 0)
    pack = (lambda x: put(to_bf16(x))) if operand == "bf16" else put
    c = put(to_bf16(old)) if result == "bf16" else put(old)
    gemm(device, layout, operand, result, pack(a), pack(b), c, m, n, k, splits, accumulate)
    got = from_bf16(c) if result == "bf16" else c
    # Sums in f32 in any order, and the rounding of the result.
    size = np.abs(left) @ np.abs(right) + np.abs(old)
    bound = 2.0**-24 * (4 + np.sqrt(k)) * size + 1e-6 + (2.0**-8 * np.abs(want) if result == "bf16" else 0)
    close(f"{layout}_{operand}_{result} m={m} n={n} k={k} splits={splits}", got, want, bound)
    return c.copy()


def main():
    device = from_arguments()
    rng = np.random.default_rng(1)
    sizes = (1, 17, 63, 64, 65, 129, 200)
    shapes = list(itertools.product(sizes, repeat=3))
    for i, (m, n, k) in enumerate(shapes):
        if device.quick and i % 10:
            continue
        # Every shape meets some variant, every variant many shapes.
        layout = ("nt", "nn", "tn")[i % 3]
        operand, result = (("bf16", "f32"), ("f32", "f32"), ("bf16", "bf16"))[i // 3 % 3]
        check(device, rng, layout, operand, result, m, n, k, splits=1 + i % 2 * 2, accumulate=i // 2 % 2)
    # Whole tiles of k with rows at multiples of 16 bytes: the path of the model's own shapes.
    for layout, (operand, result) in itertools.product(("nt", "nn", "tn"), (("bf16", "f32"), ("f32", "f32"), ("bf16", "bf16"))):
        for m, n, k in ((136, 264, 192), (8, 16, 328)):
            check(device, rng, layout, operand, result, m, n, k, splits=1, accumulate=0)
            check(device, rng, layout, operand, result, m, n, k, splits=4, accumulate=1)
    bits = []
    for order in (0, 1, 2):
        device.set_order(order)
        bits.append(check(device, np.random.default_rng(2), "tn", "bf16", "f32", 130, 72, 136, 2, 1))
    same("bits in another order of waves", bits[0], bits[1])
    same("bits in a random order of waves", bits[0], bits[2])
    report(device)


main()
