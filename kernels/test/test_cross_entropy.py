"""head_*: loss and gradients of the tied head, against numpy in double precision."""
import numpy as np

from matrix_device import Float, aligned, close, from_arguments, put, report, same

TILE = 64


def reference(y, head, labels, scale):
    """Sum of losses, gradients of y and head of scale * sum; negative labels do not count."""
    rows = np.flatnonzero(labels >= 0)
    z = y[rows] @ head.T
    z -= z.max(axis=1, keepdims=True)
    p = np.exp(z)
    p /= p.sum(axis=1, keepdims=True)
    at = (np.arange(len(rows)), labels[rows])
    loss = -np.sum(np.log(p[at]))
    p[at] -= 1
    dy = np.zeros_like(y)
    dy[rows] = scale * (p @ head)
    return loss, dy, scale * (p.T @ y[rows])


def check_reference(rng):
    y, head, labels = rng.standard_normal((4, 3)), rng.standard_normal((7, 3)), np.array([2, -1, 6, 0])
    _, dy, d_head = reference(y, head, labels, 0.5)
    for x, dx in ((y, dy), (head, d_head)):
        for at in np.ndindex(x.shape):
            old, step = x[at], 1e-6
            x[at] = old + step
            above = 0.5 * reference(y, head, labels, 0.5)[0]
            x[at] = old - step
            below = 0.5 * reference(y, head, labels, 0.5)[0]
            x[at] = old
            assert abs((above - below) / (2 * step) - dx[at]) < 1e-7, f"reference at {at}"


def cross_entropy(device, y, head, labels, scale, dy, d_head, chunk, parts):
    """As a backend calls it: chunks of `chunk` labelled rows; `parts` of the vocabulary at a time. Without dy: the loss alone."""
    (vocab, d), rows = head.shape, np.flatnonzero(labels >= 0)
    tiles = -(-vocab // TILE)
    width = -(-tiles // parts) * TILE
    loss = aligned(1, np.float64, 0.0)
    for i in range(0, len(rows), chunk):
        index = put(rows[i:i + chunk].astype(np.int32))
        n = len(index)
        chosen = put(labels[index].astype(np.int32))
        x, losses = aligned((n, d), np.float32), aligned(n, np.float32)
        top, total, target = aligned((n, tiles), np.float32), aligned((n, tiles), np.float32), aligned(n, np.float32)
        stride = -(-min(width, vocab) // 4) * 4
        exps = aligned((n, stride), np.float32) if dy is not None else None
        device.launch("head_gather", (n,), y, index, x, d)

        def logits(begin, kept, top, total, target):
            end = min(begin + width, vocab)
            grid = -(-n // TILE) * -(-(end - begin) // TILE)
            device.launch("head_logits", (grid,), x, head, chosen, kept, top, total, target, n, vocab, d, stride, begin, end)

        for begin in range(0, vocab, width):
            logits(begin, exps if parts == 1 else None, top, total, target)
        device.launch("head_normalise", (n,), top, total, target, losses, tiles, Float(scale))
        device.launch("head_loss", (1,), losses, loss, n, 1)
        if dy is None:
            continue
        dx = aligned((n, d), np.float32)
        for begin in range(0, vocab, width):
            end = min(begin + width, vocab)
            v = end - begin
            if parts > 1:
                again = [aligned((n, tiles), np.float32) for _ in range(2)]
                logits(begin, exps, *again, aligned(n, np.float32))
            device.launch("head_scale", (-(-v // 1024), n), exps, top, chosen, vocab, stride, begin, end, Float(scale))
            part, d_part = head[begin:end], d_head[begin:end]
            grid = -(-n // TILE) * -(-d // TILE)
            # Ranges of the vocabulary apart: beside the label's own gradient, the largest number by far, small ones lose digits.
            splits = -(-v // 1024)
            partial = aligned((splits, n, d), np.float32) if splits > 1 else None
            device.launch("gemm_nn_f32_f32", (grid, splits), exps, part, dx, partial, n, d, v, stride, d, d, splits, int(begin > 0))
            if splits > 1:
                device.launch("gemm_reduce_f32", (-(-n * (-(-d // 4)) // 256),), partial, dx, n, d, d, splits, int(begin > 0))
            grid = -(-v // TILE) * -(-d // TILE)
            device.launch("gemm_tn_f32_f32", (grid, 1), exps, x, d_part, None, v, d, n, stride, d, d, 1, 1)
        device.launch("head_scatter", (n,), dx, index, dy, d)
    return loss[0]


def check(device, rng, rows, vocab, d, labelled, chunk, parts, large=1.0):
    y = put((rng.standard_normal((rows, d)) * large).astype(np.float32))
    head = put((rng.standard_normal((vocab, d)) * d**-0.5).astype(np.float32))
    labels = np.full(rows, -1, np.int64)
    chosen = rng.permutation(rows)[:labelled]
    labels[chosen] = rng.integers(0, vocab, labelled)
    if labelled > 2:
        labels[chosen[:2]] = (vocab - 1, 0)
    scale = 0.37
    before = rng.standard_normal((vocab, d)).astype(np.float32)
    dy, d_head = put(np.zeros((rows, d), np.float32)), put(before)
    loss = cross_entropy(device, y, head, labels, scale, dy, d_head, chunk, parts)
    alone = cross_entropy(device, y, head, labels, scale, None, None, chunk, parts)
    want, want_y, want_head = reference(y.astype(np.float64), head.astype(np.float64), labels, np.float32(scale).astype(np.float64))
    what = f"rows={rows} vocab={vocab} d={d} labelled={labelled} chunk={chunk} parts={parts}"
    same(f"loss without gradients {what}", alone, loss)
    close(f"loss {what}", np.array([loss]), np.array([want]), 1e-6 * max(want, 1))
    close(f"dy {what}", dy, want_y, 3e-6 * np.abs(want_y).max(initial=1e-3))
    # What was there before is rounded with the sum.
    close(f"d_head {what}", d_head - before, want_head, 4e-6 * np.abs(want_head).max(initial=1e-3) + 2.0**-23 * np.abs(before))
    assert not dy[labels < 0].any(), "a row without a label got a gradient"
    return [np.array([loss]), dy.copy(), d_head.copy()]


def main():
    device = from_arguments()
    rng = np.random.default_rng(1)
    check_reference(rng)
    check(device, rng, 70, 1000, 40, 66, 66, 1)
    check(device, rng, 9, 1000, 64, 7, 4, 3)
    check(device, rng, 3, 4099, 20, 3, 3, 1, large=30.0)
    check(device, rng, 5, 50, 8, 0, 8, 1)
    if not device.quick:
        check(device, rng, 66, 4099, 72, 65, 40, 1)
        check(device, rng, 20, 4099, 64, 20, 20, 2)
        check(device, rng, 1, 17, 5, 1, 1, 1)
    bits = []
    for order in (0, 2):
        device.set_order(order)
        bits.append(check(device, np.random.default_rng(5), 20, 300, 24, 18, 10, 1))
    for a, b in zip(*bits):
        same("bits in another order of waves", a, b)
    report(device)


main()
