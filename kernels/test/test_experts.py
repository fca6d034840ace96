"""experts_*: sorting, grouped products in both directions and the skip class, against numpy in double precision."""
import numpy as np

from matrix_device import aligned, close, from_arguments, from_bf16, put, report, rounded, same, to_bf16

GROUPS = 16
TILE = {"bf16": 128, "f32": 64}
# Of the largest number of a tensor. bf16: operands and stored tensors are rounded to 8 bits; f32: sums in another order.
BOUND = {"bf16": 2.0**-7, "f32": 4e-6}


def swiglu(gate_up):
    gate, up = np.split(gate_up, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def forward(h, choice, prob, w1, w2, identity):
    """Spec 1.6 for given choices."""
    out = np.zeros_like(h)
    for e in range(len(w1)):
        rows = choice == e
        out[rows] = prob[rows, None] * (swiglu(h[rows] @ w1[e].T) @ w2[e].T)
    if identity:
        rows = choice == len(w1)
        out[rows] = prob[rows, None] * h[rows]
    return out


def backward(h, choice, prob, w1, w2, identity, dy):
    dh, dp = np.zeros_like(h), np.zeros_like(prob)
    d_w1, d_w2 = [np.zeros_like(w) for w in w1], [np.zeros_like(w) for w in w2]
    for e in range(len(w1)):
        rows = choice == e
        gate, up = np.split(h[rows] @ w1[e].T, 2, axis=1)
        sig = 1 / (1 + np.exp(-gate))
        act = gate * sig * up
        dp[rows] = np.sum(dy[rows] * (act @ w2[e].T), axis=1)
        d_out = prob[rows, None] * dy[rows]
        d_w2[e] = d_out.T @ act
        d_act = d_out @ w2[e]
        d_gate_up = np.concatenate([d_act * up * sig * (1 + gate * (1 - sig)), d_act * gate * sig], axis=1)
        d_w1[e] = d_gate_up.T @ h[rows]
        dh[rows] = d_gate_up @ w1[e]
    if identity:
        rows = choice == len(w1)
        dh[rows] = prob[rows, None] * dy[rows]
        dp[rows] = np.sum(dy[rows] * h[rows], axis=1)
    return dh, dp, d_w1, d_w2


def check_reference(rng):
    """The reference's gradients against differences of its own forward."""
    tokens, d, f, experts = 9, 5, 4, 2
    h, dy = rng.standard_normal((tokens, d)), rng.standard_normal((tokens, d))
    choice, prob = rng.integers(0, experts + 1, tokens), rng.uniform(0.2, 1, tokens)
    w1, w2 = [rng.standard_normal((2 * f, d)) for _ in range(experts)], [rng.standard_normal((d, f)) for _ in range(experts)]
    for identity in (0, 1):
        dh, dp, d_w1, d_w2 = backward(h, choice, prob, w1, w2, identity, dy)
        for x, dx in [(h, dh), (prob, dp), *zip(w1, d_w1), *zip(w2, d_w2)]:
            for at in list(np.ndindex(x.shape))[::3]:
                old, step = x[at], 1e-6
                x[at] = old + step
                above = np.sum(dy * forward(h, choice, prob, w1, w2, identity))
                x[at] = old - step
                below = np.sum(dy * forward(h, choice, prob, w1, w2, identity))
                x[at] = old
                slope = (above - below) / (2 * step)
                assert abs(slope - dx[at]) < 1e-6 * (1 + abs(slope)), f"reference: {slope} not {dx[at]}"


def sort(device, choice, valid, experts, tile):
    """order, offsets and first, from the device; checked against a stable sort."""
    tokens, classes = len(choice), experts + 1
    chunks = -(-tokens // 256)
    counts, real = aligned((chunks, classes), np.int32), aligned((chunks, classes), np.int32)
    offsets, real_counts = aligned(classes + 1, np.int32), aligned(classes, np.int32)
    first, order = aligned(classes, np.int32), aligned(tokens, np.int32)
    device.launch("experts_count", (chunks,), choice, valid, counts, real, tokens, classes)
    device.launch("experts_plan", (1,), counts, real, offsets, real_counts, first, chunks, classes, tile)
    device.launch("experts_place", (chunks,), choice, counts, order, tokens, classes)
    n = np.bincount(choice, minlength=classes)
    same("order", order, np.argsort(choice, kind="stable"))
    same("offsets", offsets, np.concatenate([[0], np.cumsum(n)]))
    same("first", first, np.concatenate([[0], np.cumsum(-(-n // tile))])[:classes])
    same("real counts", real_counts, np.bincount(choice[valid != 0] if valid is not None else choice, minlength=classes))
    return order, offsets, first


def check(device, rng, kind, choice, experts, d, f, identity):
    tokens = len(choice)
    choice = put(choice.astype(np.uint32))
    valid = put((rng.uniform(size=tokens) < 0.9).astype(np.uint8))
    order, offsets, first = sort(device, choice, valid, experts, TILE[kind])
    number = rounded if kind == "bf16" else (lambda x: x)
    pack = (lambda x: put(to_bf16(x))) if kind == "bf16" else put
    storage = np.uint16 if kind == "bf16" else np.float32
    unpack = from_bf16 if kind == "bf16" else (lambda x: x)
    h = number(rng.standard_normal((tokens, d)).astype(np.float32))
    dy = number(rng.standard_normal((tokens, d)).astype(np.float32))
    prob = put(rng.uniform(0.1, 1, tokens).astype(np.float32))
    w1 = number((rng.standard_normal((experts, 2 * f, d)) * d**-0.5).astype(np.float32))
    w2 = number((rng.standard_normal((experts, d, f)) * f**-0.5).astype(np.float32))
    # Matrices of experts in one array, expert by expert backwards: places are not what one would guess.
    all1, all2 = pack(w1[::-1].copy()), pack(w2[::-1].copy())
    place1 = put(np.array([(experts - 1 - e) * 2 * f * d for e in range(experts)], np.int64))
    place2 = put(np.array([(experts - 1 - e) * d * f for e in range(experts)], np.int64))
    what = f"tokens={tokens} experts={experts} d={d} f={f} identity={identity}"

    def permuted(x, by=None):
        out = aligned((tokens, d), storage)
        device.launch("experts_permute_f32_bf16" if kind == "bf16" else "experts_permute_f32_f32", (tokens,), put(x), order, by, out, d)
        return out

    x = permuted(h)
    same(f"permute {what}", unpack(x), h[order])
    gate_up, act = aligned((tokens, 2 * f), storage), aligned((tokens, f), storage)
    out = aligned((tokens, d), np.float32)
    h32 = put(h)
    device.launch(f"experts_gate_up_{kind}", (GROUPS,), x, all1, place1, offsets, first, gate_up, act, experts, d, f, GROUPS)
    device.launch(f"experts_down_{kind}", (GROUPS,), act, all2, place2, offsets, first, order, prob, out, experts, d, f, GROUPS)
    device.launch("experts_skip_forward", (tokens,), h32, order, offsets, prob, out, experts, d, identity)
    exact = [np.asarray(v, np.float64) for v in (h, prob, dy)]
    e1, e2 = list(w1.astype(np.float64)), list(w2.astype(np.float64))
    want = forward(exact[0], choice, exact[1], e1, e2, identity)

    def near(name, got, want):
        close(f"{kind}_{name} {what}", got, want, BOUND[kind] * max(np.abs(want).max(initial=0.0), 1e-3))

    near("out", out, want)

    rows_dy, rows_pdy = permuted(dy), permuted(dy, prob)
    columns = -(-f // TILE[kind]) * 2
    d_gate_up, act2 = aligned((tokens, 2 * f), storage), aligned((tokens, f), storage)
    parts, dh, d_prob = aligned((tokens, columns), np.float32), aligned((tokens, d), np.float32), aligned(tokens, np.float32)
    device.launch(f"experts_d_act_{kind}", (GROUPS,), rows_dy, all2, place2, offsets, first, order, prob, gate_up, d_gate_up, act2, parts,
                  experts, d, f, GROUPS)
    device.launch("experts_d_prob", (-(-tokens // 256),), parts, order, offsets, d_prob, experts, columns)
    device.launch(f"experts_d_input_{kind}", (GROUPS,), d_gate_up, all1, place1, offsets, first, order, dh, experts, d, f, GROUPS)
    device.launch("experts_skip_backward", (tokens,), h32, order, offsets, prob, put(dy), dh, d_prob, experts, d, identity)
    before1 = rng.standard_normal((experts, 2 * f, d)).astype(np.float32)
    before2 = rng.standard_normal((experts, d, f)).astype(np.float32)
    g1, g2 = put(before1[::-1].copy()), put(before2[::-1].copy())
    tile = TILE[kind]
    device.launch(f"experts_weight_gradient_{kind}", (-(-2 * f // tile) * -(-d // tile), experts), d_gate_up, x, g1, place1, offsets, 2 * f, d)
    device.launch(f"experts_weight_gradient_{kind}", (-(-d // tile) * -(-f // tile), experts), rows_pdy, act2, g2, place2, offsets, d, f)
    want_h, want_p, want1, want2 = backward(exact[0], choice, exact[1], e1, e2, identity, exact[2])
    near("dh", dh, want_h)
    near("d_prob", d_prob, want_p)
    near("d_gate_up_weight", g1[::-1] - before1, np.array(want1))
    near("d_down_weight", g2[::-1] - before2, np.array(want2))
    for e in range(experts):
        if not np.any(choice == e):
            same(f"gradient of an unused expert {what}", g1[::-1][e], before1[e])
    return [out.copy(), dh.copy(), d_prob.copy(), g1.copy(), g2.copy()]


def main():
    device = from_arguments()
    rng = np.random.default_rng(1)
    check_reference(rng)
    for tokens, experts in ((1, 1), (255, 3), (257, 16), (700, 200)):
        sort(device, put(rng.integers(0, experts + 1, tokens).astype(np.uint32)), None, experts, 128)
    for kind in ("bf16", "f32"):
        # All rows to one expert; one row for another; an expert without rows; only skipped rows.
        cases = [
            (np.full(70, 1), 2, 24, 17, 0),
            (np.array([0] * 65 + [2] + [3] * 3), 3, 72, 40, 1),
            (rng.integers(0, 4, 150), 3, 128, 136, 1),
            (np.full(5, 2), 2, 16, 16, 1),
            (np.zeros(1, int), 1, 8, 8, 0),
        ]
        for choice, experts, d, f, identity in cases[:3] if device.quick else cases:
            check(device, rng, kind, choice, experts, d, f, identity)
    bits = []
    for order in (0, 2):
        device.set_order(order)
        bits.append(check(device, np.random.default_rng(7), "bf16", np.random.default_rng(3).integers(0, 4, 80), 3, 40, 72, 1))
    for a, b in zip(*bits):
        same("bits in another order of waves", a, b)
    report(device)


main()
