"""muon_*, ns_* and adamw: several updates of matrices of all forms, against numpy in double precision."""
import numpy as np

from matrix_device import Float, Long, aligned, close, from_arguments, put, report, rounded, same, to_bf16

A, B, C = 3.4445, -4.7750, 2.0315
TILE = {"bf16": 128, "f32": 64}
CHUNK = 4096
# Error of the weights after a number of steps.
BOUND = {"bf16": {1: 2e-4, 2: 2e-3, 5: 5e-2}, "f32": {1: 2e-6, 2: 4e-6, 5: 2e-5}}


def muon(w, g, m, step, product=lambda x: x):
    """Spec 3.3; `product` rounds operands of products."""
    lr, decay, mu, steps, scale = step
    g = g * scale
    m = mu * m + (1 - mu) * g
    u = (1 - mu) * g + mu * m
    x = u / max(np.linalg.norm(u), 1e-7)
    if x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(steps):
        a = product(x) @ product(x).T
        b = B * a + C * (product(a) @ product(a))
        x = A * x + product(b) @ product(x)
    if w.shape[0] > w.shape[1]:
        x = x.T
    return (1 - lr * decay) * w - lr * 0.2 * np.sqrt(max(w.shape)) * x, m, x


class Table:
    """Places of matrices, and the workspace; what a backend makes once."""

    def __init__(self, shapes, kind):
        self.kind, self.shapes = kind, shapes
        dtype = np.dtype([(n, np.int64) for n in ("weight", "gradient", "momentum", "half", "x", "operand0", "operand1", "a", "a_operand",
                                                  "b")] + [("rows", np.int32), ("cols", np.int32)])
        self.entries, at, work = np.zeros(len(shapes), dtype), 0, 0

        def take(numbers, half):
            nonlocal work
            begin = work
            work += -(-(numbers // 2 + 1 if half else numbers) // 16) * 16
            return begin

        for entry, (rows, cols) in zip(self.entries, shapes):
            n, short, half = rows * cols, min(rows, cols), kind == "bf16"
            entry["weight"] = entry["gradient"] = entry["momentum"] = entry["half"] = at
            entry["rows"], entry["cols"] = rows, cols
            at += -(-n // 16) * 16
            entry["x"] = take(n, False)
            entry["operand0"] = take(n, True) if half else entry["x"]
            entry["operand1"] = take(n, half)
            entry["a"] = take(short * short, False)
            entry["a_operand"] = take(short * short, True) if half else entry["a"]
            entry["b"] = take(short * short, half)
        self.numbers, self.work = at, aligned(work, np.float32)

    def first(self, count):
        """Table of the parts before each matrix, for some count of parts of (rows, cols); and their number."""
        parts = np.concatenate([[0], np.cumsum([count(rows, cols) for rows, cols in self.shapes])]).astype(np.int32)
        return put(parts), int(parts[-1])


def update(device, table, entries, weights, gradients, momenta, halves, step):
    lr, decay, mu, steps, scale = step
    kind, count, tile = table.kind, len(table.shapes), TILE[table.kind]
    chunks, n_chunks = table.first(lambda r, c: -(-r * c // CHUNK))
    squares, inverse = aligned(n_chunks, np.float64), aligned(count, np.float32)
    device.launch("muon_mix", (n_chunks,), entries, chunks, gradients, momenta, table.work, squares, count, Float(mu), Float(scale))
    device.launch("muon_norm", (count,), chunks, squares, inverse)
    device.launch(f"muon_scale_{kind}", (n_chunks,), entries, chunks, inverse, table.work, count)

    def tiles(n):
        return -(-n // tile)

    def pairs(n):
        return tiles(n) * (tiles(n) + 1) // 2

    launches = []
    for name, form in (("wide", lambda r, c: r < c), ("tall", lambda r, c: r >= c)):
        launches.append((f"ns_gram_{name}", table.first(lambda r, c: pairs(min(r, c)) if form(r, c) else 0)))
    launches.append(("ns_square", table.first(lambda r, c: pairs(min(r, c)))))
    for name, form in (("wide", lambda r, c: r < c), ("tall", lambda r, c: r >= c)):
        launches.append((f"ns_apply_{name}", table.first(lambda r, c: tiles(r) * tiles(c) if form(r, c) else 0)))
    for i in range(steps):
        for name, (first, n) in launches:
            if n:
                from_place = () if name == "ns_square" else (i % 2,)
                device.launch(f"{name}_{kind}", (n,), entries, first, table.work, count, *from_place)
    place = steps % 2 if kind == "f32" else 0
    device.launch("muon_update", (n_chunks,), entries, chunks, table.work, weights, halves, count, place, Float(lr), Float(decay))


def check(device, rng, kind, shapes, updates, steps=5):
    table = Table(shapes, kind)
    # As bytes: the launch passes the table's address.
    entries = put(table.entries.view(np.uint8))
    step = (0.02, 0.1, 0.95, steps, 0.5)
    weights, momenta = put(np.zeros(table.numbers, np.float32)), put(np.zeros(table.numbers, np.float32))
    halves = put(np.zeros(table.numbers, np.uint16))
    lr = step[0]
    state, last = [], [None] * len(shapes)
    for entry, (rows, cols) in zip(table.entries, shapes):
        w = (0.02 * rng.standard_normal((rows, cols))).astype(np.float32)
        weights[entry["weight"]:entry["weight"] + w.size] = w.ravel()
        state.append((w.astype(np.float64), np.zeros((rows, cols))))
    product = rounded if kind == "bf16" else (lambda x: x)
    for _ in range(updates):
        gradients = put(np.zeros(table.numbers, np.float32))
        for i, (entry, (rows, cols)) in enumerate(zip(table.entries, shapes)):
            g = (1e-3 * rng.standard_normal((rows, cols))).astype(np.float32)
            gradients[entry["gradient"]:entry["gradient"] + g.size] = g.ravel()
            w, m, last[i] = muon(state[i][0], g.astype(np.float64), state[i][1], step, lambda x: product(x).astype(np.float64))
            state[i] = (w, m)
        update(device, table, entries, weights, gradients, momenta, halves, step)
    for i, (entry, (rows, cols)) in enumerate(zip(table.entries, shapes)):
        part = slice(entry["weight"], entry["weight"] + rows * cols)
        what = f"{rows}x{cols} steps={steps}"
        close(f"{kind}_momentum {what}", momenta[part].reshape(rows, cols), state[i][1], 1e-9)
        # Of the size of an update. Newton-Schulz enlarges what the operands' rounding does: bf16 steps that round the other way
        # here and there end 1 to 3 % apart, as the exact iteration and one with bf16 operands do.
        change = lr * 0.2 * np.sqrt(max(rows, cols)) * np.linalg.norm(last[i])
        error = np.linalg.norm(weights[part].reshape(rows, cols) - state[i][0])
        close(f"{kind}_weight {what}", np.array([error]), np.zeros(1), updates * change * BOUND[kind][min(steps, 5)])
        same(f"{kind}_half {what}", halves[part], to_bf16(weights[part]))
    return weights.copy()


def adamw_reference(w, g, m, v, t, lr, b1, b2, eps, decay, scale):
    g = g * scale
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    return w * (1 - lr * decay) - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps), m, v


def check_adamw(device, rng, n):
    w, m, v = put(rng.standard_normal(n).astype(np.float32)), put(np.zeros(n, np.float32)), put(np.zeros(n, np.float32))
    half = aligned(n, np.uint16)
    lr, b1, b2, eps, decay, scale = (float(np.float32(x)) for x in (0.01, 0.9, 0.95, 1e-8, 0.1, 0.25))
    want = (w.astype(np.float64), np.zeros(n), np.zeros(n))
    for t in (1, 2, 3):
        g = put(rng.standard_normal(n).astype(np.float32) * 10.0 ** rng.integers(-6, 1, n).astype(np.float32))
        want = adamw_reference(*[want[0], g.astype(np.float64), want[1], want[2]], t, lr, b1, b2, eps, decay, scale)
        device.launch("adamw", (-(-n // 1024),), w, g, m, v, half, Long(n), Float(lr), Float(b1), Float(b2), Float(eps),
                      Float(np.float32(1) - np.float32(lr) * np.float32(decay)), Float(1 - b1**t), Float(1 - b2**t), Float(scale))
    close(f"adamw_weight n={n}", w, want[0], 2e-6)
    close(f"adamw_m n={n}", m, want[1], 1e-6 * np.abs(want[1]) + 1e-9)
    close(f"adamw_v n={n}", v, want[2], 1e-6 * np.abs(want[2]) + 1e-15)
    same(f"adamw_half n={n}", half, to_bf16(w))


def main():
    device = from_arguments()
    rng = np.random.default_rng(1)
    for n in (1, 3, 1024, 4099):
        check_adamw(device, rng, n)
    wide, tall, square = (17, 70), (129, 40), (65, 65)
    for kind in ("bf16", "f32"):
        check(device, rng, kind, [wide, tall, square, (1, 9), (9, 1)], 1 if device.quick else 2)
        check(device, rng, kind, [wide, tall, square], 1, steps=1)
        check(device, rng, kind, [wide, tall, square], 1, steps=2)
    if not device.quick:
        # More than a tile along the short side, more than a chunk.
        check(device, rng, "bf16", [(136, 264), (264, 136)], 1)
        check(device, rng, "f32", [(72, 136), (136, 72)], 1)
    bits = []
    for order in (0, 2):
        device.set_order(order)
        bits.append(check(device, np.random.default_rng(9), "bf16", [(24, 40), (40, 24)], 1))
    same("bits in another order of waves", *bits)
    report(device)


main()
