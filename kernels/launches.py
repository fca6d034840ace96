"""The launch of each kernel that zaya makes for ZAYA1-8B's own shapes, for kernels/table.py.

Shapes: model preset `zaya1-base`, and a micro-batch of `recipes/zaya1-base-stage1.toml`, 4 sequences of 4,096 tokens. Where a launch's
workgroups are alike only a part of them is run, and the counts are multiplied by `times`. Launches of one list run in order: some need
what others wrote.
"""
import dataclasses

import numpy as np

SEQ, SEQUENCES = 4096, 4
T = SEQ * SEQUENCES
D, HEADS, KV, HEAD, ROTARY = 2048, 8, 2, 128, 64
Q_DIM, KV_DIM = HEADS * HEAD, KV * HEAD
CHANNELS = Q_DIM + KV_DIM
EXPERTS, F, ROUTER, VOCAB = 16, 2048, 256, 262272
CLASSES = EXPERTS + 1
# Tokens of an expert, dealt evenly.
OWN = T // EXPERTS
# Rows that kernels whose rows are alike run here.
ROWS = 1024
PART = T // ROWS


class Array:
    """Device memory of `count` numbers of `size` bytes; zeros, or `contents`."""

    def __init__(self, count, size=4, contents=None):
        self.bytes, self.contents = count * size, contents
        self.pointer = None

    @staticmethod
    def of(numbers, dtype=np.int32):
        contents = np.ascontiguousarray(numbers, dtype)
        return Array(contents.size, contents.itemsize, contents)


@dataclasses.dataclass
class Use:
    array: Array
    mode: str


def use(mode):
    return lambda x, size=4: Use(x if isinstance(x, Array) else Array(x, size), mode)


read, write, change = use("read"), use("write"), use("change")
# Read whole by all workgroups, such as weights: once, however many rows there are; by the cache of every chiplet.
shared = use("shared")
CHIPLETS = 8


class Long(int):
    """An argument of 64 bits; other whole numbers have 32."""


@dataclasses.dataclass
class Launch:
    kernel: str
    # What it works on, for the table.
    shape: str
    # Workgroups that are run.
    grid: tuple
    args: list
    # The whole launch is so many times what is run.
    times: float = 1
    items: int = 256
    # Floating-point operations of the mathematics, and the least bytes (each operand and result once), of the whole launch.
    flop: float = 0
    least: float = None

    def least_bytes(self):
        if self.least is not None:
            return self.least
        uses = [a for a in self.args if isinstance(a, Use)]
        own = sum(u.array.bytes * (2 if u.mode == "change" else 1) for u in uses if u.mode != "shared")
        return self.times * own + self.shared_bytes()

    def shared_bytes(self):
        return sum(a.array.bytes for a in self.args if isinstance(a, Use) and a.mode == "shared")

    def moved_bytes(self, counted):
        """Of the whole launch, from what passed the caches in the part that was run."""
        for_all = CHIPLETS * self.shared_bytes()
        return self.times * (counted - for_all) + for_all

    def whole(self):
        """Whether all of it is run, or rows that are like the others: then bytes can be told from the part."""
        return self.least is None


def residual_norm():
    vectors = lambda: [shared(D) for _ in range(5)]
    blocks = ROWS // 16
    for kind, size in (("", 2), ("f32_", 4)):
        yield Launch(f"residual_norm_fwd_{kind}2048", f"{T} x {D}", (ROWS,),
                     [read(ROWS * D, 2), read(ROWS * D), *vectors(), write(ROWS * D), write(ROWS * D, size), write(ROWS), D, 1e-5],
                     times=PART, flop=8.0 * T * D)
    yield Launch("residual_norm_bwd_2048", f"{T} x {D}", (blocks,),
                 [read(ROWS * D, 2), read(ROWS * D), *vectors(), read(ROWS), read(ROWS * D), read(ROWS * D), write(ROWS * D, 2),
                  write(ROWS * D), write(blocks * 4 * D), ROWS, D, 16], times=PART, flop=25.0 * T * D)
    blocks = T // 16
    yield Launch("residual_norm_params", f"{blocks} x 4 x {D}", (D // 256,),
                 [read(blocks * 4 * D), read(D), read(D), *(change(D) for _ in range(5)), blocks, D], flop=4.0 * blocks * D)


def cca_mix():
    history = Array(ROWS * 4)
    yield Launch("cca_mix_history", f"{T} rows", (ROWS // 256,), [None, None, write(history), ROWS, SEQ], times=PART)
    packed = 2 * CHANNELS * HEAD
    yield Launch("cca_mix_pack", f"{CHANNELS} x {HEAD} x 2", (packed // 256,),
                 [read(packed), write(packed, 2), write(packed, 2), HEADS + KV, HEAD])
    common = lambda: [read(ROWS * Q_DIM), read(ROWS * KV_DIM), None, None, read(2 * CHANNELS), read(CHANNELS), read(history), ROWS, HEADS, KV]
    convolution = 2.0 * T * CHANNELS * HEAD * 2
    yield Launch("cca_mix_fwd_128", f"{T} x {CHANNELS}", (ROWS // 64, KV),
                 [*common(), shared(packed, 2), shared(CHANNELS), read(KV), read(ROWS * ROTARY), ROTARY, write(ROWS * Q_DIM, 2),
                  write(ROWS * KV_DIM, 2), write(ROWS * CHANNELS)], times=PART, flop=convolution)
    half = KV_DIM // 2
    yield Launch("cca_mix_values_fwd", f"{T} x {KV_DIM}", (ROWS * KV_DIM // 256,),
                 [read(ROWS * half), read(ROWS * half), None, read(history), write(ROWS * KV_DIM, 2), ROWS, KV_DIM], times=PART)
    yield Launch("cca_mix_bwd_norm", f"{T} x {CHANNELS}", (ROWS // 16,),
                 [read(ROWS * Q_DIM), read(ROWS * KV_DIM), read(ROWS * CHANNELS), read(KV), read(history), read(ROWS * ROTARY), ROTARY,
                  write(ROWS * CHANNELS), write(ROWS // 16 * KV, 8), ROWS, HEADS, KV, HEAD], times=PART, flop=12.0 * T * CHANNELS)
    yield Launch("cca_mix_bwd_values", f"{T} x {KV_DIM}", (ROWS * half // 256,),
                 [read(ROWS * KV_DIM), read(history), write(ROWS * half, 2), write(ROWS * half, 2), ROWS, KV_DIM], times=PART)
    blocks = -(-ROWS // 63)
    yield Launch("cca_mix_bwd_input_128", f"{T} x {CHANNELS}", (blocks, KV),
                 [*common(), shared(packed, 2), read(ROWS * CHANNELS), write(ROWS * Q_DIM, 2), write(ROWS * KV_DIM, 2),
                  write(blocks * CHANNELS * 2)], times=PART, flop=convolution)
    blocks = ROWS // 64
    yield Launch("cca_mix_bwd_weight_128", f"{T} x {CHANNELS}", (blocks, HEADS + KV),
                 [*common(), read(ROWS * CHANNELS), write(blocks * packed), write(blocks * CHANNELS), 64], times=PART, flop=convolution)
    blocks = T // 64
    yield Launch("cca_mix_bwd_conv1", f"{blocks} x {packed}", (packed // 256,),
                 [read(blocks * packed), change(packed), blocks, CHANNELS, HEAD], flop=float(blocks * packed))
    of_input, of_norm = -(-T // 63), T // 16
    yield Launch("cca_mix_bwd_params", f"{CHANNELS} channels", (HEADS + KV,),
                 [read(of_input * CHANNELS * 2), of_input, None, 0, read(blocks * CHANNELS), blocks, read(of_norm * KV, 8), of_norm,
                  read(packed), change(2 * CHANNELS), change(CHANNELS), change(CHANNELS), change(KV), HEADS, KV, HEAD])
    # Chunks of one row each, so that all that is there is a halo.
    halos = Array.of(np.tile([0, 2, 0, 0], SEQUENCES))
    yield Launch("cca_mix_bwd_halo", f"{SEQUENCES} chunks", (SEQUENCES, HEADS + KV),
                 [read(SEQUENCES * Q_DIM), read(SEQUENCES * KV_DIM), read(2 * SEQUENCES * Q_DIM), read(2 * SEQUENCES * KV_DIM),
                  read(2 * CHANNELS), read(CHANNELS), read(halos), SEQUENCES, HEADS, KV, read(packed), read(SEQUENCES * CHANNELS),
                  read(SEQUENCES * KV_DIM), write(2 * SEQUENCES * Q_DIM), write(2 * SEQUENCES * KV_DIM), write(SEQUENCES * KV_DIM // 2),
                  write(SEQUENCES * CHANNELS * 2), 1, HEAD])


def attention():
    # A chunk of 256 rows in the middle of a sequence: its rows see 2,048 keys in the mean, as those of a whole one.
    rows = 256
    times = T // rows * KV
    start = Array.of([SEQ // 2 - rows // 2])
    sight = lambda valid=None: [None, read(start), valid, rows, rows, SEQ, HEADS, KV, 0, 0, HEAD ** -0.5]
    columns = rows * HEADS // KV // 128
    q, kv, stat = T * Q_DIM, T * KV_DIM, T * HEADS * 4
    pairs = T * SEQ / 2 * Q_DIM
    of_q, of_kv, of_stat = lambda: read(rows * Q_DIM, 2), lambda: read(SEQ * KV_DIM, 2), lambda: read(rows * HEADS)
    shape = f"{SEQUENCES} x {SEQ}, {HEADS} of {KV} heads of {HEAD}"
    yield Launch("attention_fwd_128", shape, (columns, 1), [of_q(), of_kv(), of_kv(), write(rows * Q_DIM, 2), write(rows * HEADS), *sight()],
                 times=times, flop=4 * pairs, least=2 * q + 2 * 2 * kv + 2 * q + stat)
    yield Launch("attention_bwd_delta", shape, (ROWS * HEADS // 4,),
                 [read(ROWS * Q_DIM, 2), read(ROWS * Q_DIM, 2), write(ROWS * HEADS), ROWS * HEADS, HEAD], times=PART, flop=2.0 * q)
    backward = lambda: [of_q(), of_kv(), of_kv(), of_stat(), of_stat(), of_q()]
    yield Launch("attention_bwd_q_128", shape, (columns, 1), [*backward(), write(rows * Q_DIM), *sight()], times=times, flop=6 * pairs,
                 least=2 * 2 * q + 2 * 2 * kv + 2 * stat + 4 * q)
    yield Launch("attention_bwd_kv_128", shape, (SEQ // 128, 1), [*backward(), write(SEQ * KV_DIM), write(SEQ * KV_DIM), *sight()],
                 times=times, flop=8 * pairs, least=2 * 2 * q + 2 * 2 * kv + 2 * stat + 2 * 4 * kv)
    # Batches with padding: these only look whether a row sees nothing but padding.
    valid = Array.of(np.ones(SEQ), np.uint8)
    few = rows * HEADS // KV
    yield Launch("attention_padding_fwd", shape, (few, 1), [read(SEQ * KV_DIM, 2), change(rows * Q_DIM, 2), change(rows * HEADS), HEAD, *sight(read(valid))],
                 times=times, items=64, least=2 * T * HEADS)
    yield Launch("attention_padding_bwd_q", shape, (few, 1),
                 [of_kv(), of_kv(), of_stat(), of_stat(), of_q(), change(rows * Q_DIM), HEAD, *sight(read(valid))], times=times, items=64, least=2 * T * HEADS)
    yield Launch("attention_padding_bwd_kv", shape, (64, 1),
                 [of_q(), of_kv(), of_stat(), of_stat(), of_q(), change(SEQ * KV_DIM), change(SEQ * KV_DIM), HEAD, *sight(read(valid))],
                 times=T / 64 * KV, items=64, least=T)


def router():
    square, out = ROUTER * ROUTER, 32 * ROUTER
    yield Launch("router_pack", f"{ROUTER} x {ROUTER}", (square // 256,), [read(square), write(square, 2), ROUTER, ROUTER, 0, 16, 16])
    numbers = lambda count=1: ROWS * ROUTER * count
    layers = 2.0 * T * (2 * square + CLASSES * ROUTER)
    yield Launch("router_fwd_256", f"{T} x {ROUTER}, {CLASSES} classes", (ROWS // 64,),
                 [read(numbers()), shared(ROUTER), read(numbers()), shared(ROUTER), shared(ROUTER), shared(square, 2), shared(ROUTER),
                  shared(square, 2), shared(ROUTER), shared(out, 2), read(CLASSES), None, write(numbers()), write(ROWS), write(numbers(2)), write(ROWS * CLASSES),
                  write(ROWS * CLASSES), write(ROWS), write(ROWS), ROWS, ROUTER, CLASSES, 1e-5], times=PART, flop=layers)
    partial, work = Array(ROWS // 64 * 5 * ROUTER), Array(numbers(6), 2)
    yield Launch("router_bwd_mlp_256", f"{T} x {ROUTER}, {CLASSES} classes", (ROWS // 64,),
                 [read(ROWS), read(ROWS), read(ROWS * CLASSES), read(ROWS), read(numbers(2)), shared(square, 2), shared(out, 2),
                  write(ROWS * CLASSES, 2), write(numbers(4), 2), write(partial), ROWS, ROUTER, CLASSES], times=PART,
                 flop=2.0 * T * (square + CLASSES * ROUTER))
    yield Launch("router_bwd_state_256", f"{T} x {ROUTER}", (ROWS // 64,),
                 [read(numbers()), read(numbers()), read(ROWS), read(numbers()), read(ROUTER), read(ROUTER), read(square, 2), Use(work, "part"),
                  write(numbers()), write(partial), ROWS, ROUTER], times=PART, flop=2.0 * T * square,
                 # Of `work` it reads one of the six matrices and writes two.
                 least=T * ROUTER * (4 * 4 + 3 * 2))
    blocks = T // 64
    yield Launch("router_params", f"{blocks} x 5 x {ROUTER}", (5 * ROUTER // 256,),
                 [read(blocks * 5 * ROUTER), *(change(ROUTER) for _ in range(5)), blocks, ROUTER])
    choice = Array.of(np.random.default_rng(1).integers(0, CLASSES, T))
    yield Launch("router_counts", f"{T} rows, {CLASSES} classes", (CLASSES,), [read(choice), None, write(CLASSES), T])
    chunks = T // 256
    counts, real, order, offsets = Array(chunks * CLASSES), Array(chunks * CLASSES), Array(T), Array(CLASSES + 1)
    rows = f"{T} rows, {CLASSES} classes"
    yield Launch("experts_count", rows, (chunks,), [read(choice), None, write(counts), write(real), T, CLASSES])
    yield Launch("experts_plan", rows, (1,), [change(counts), read(real), write(offsets), write(CLASSES), write(CLASSES), chunks, CLASSES, 128])
    yield Launch("experts_place", rows, (chunks,), [read(choice), read(counts), write(order), T, CLASSES])


def experts():
    shuffled = Array.of(np.random.default_rng(2).permutation(ROWS))
    rows = f"{T} x {D}"
    for kind, (a, b) in {"f32_bf16": (4, 2), "bf16_bf16": (2, 2), "f32_f32": (4, 4)}.items():
        yield Launch(f"experts_permute_{kind}", rows, (ROWS,), [read(ROWS * D, a), read(shuffled), None, write(ROWS * D, b), D], times=PART)
    yield Launch("experts_unpermute_f32", rows, (ROWS,), [read(ROWS * D), read(shuffled), write(ROWS * D), D], times=PART)
    # All rows are of the skip class here; of a real batch about one in seventeen is.
    no_rows = Array.of(np.zeros(EXPERTS + 1))
    yield Launch("experts_skip_forward", rows + ", all skip", (ROWS,), [None, read(shuffled), read(no_rows), read(ROWS), write(ROWS * D), EXPERTS, D, 0], times=PART)
    yield Launch("experts_skip_backward", rows + ", all skip", (ROWS,),
                 [None, read(shuffled), read(no_rows), read(ROWS), None, write(ROWS * D), write(ROWS), EXPERTS, D, 0], times=PART)
    # One tile of rows of one expert is run: eight workgroups walk over its columns.
    order, weights = Array.of(np.arange(128)), EXPERTS * F * D
    for kind, size, tile in (("bf16", 2, 128), ("f32", 4, 64)):
        tiles = T // tile
        one = lambda: [read(Array.of([0], np.int64)), read(Array.of([0, tile, tile])), read(Array.of([0, 1]))]
        numbers = lambda width: tile * width
        shape, flop = f"{EXPERTS} x {OWN} rows, {D} x {F}", 2.0 * T * D * F
        sizes = [1, D, F, 8]
        yield Launch(f"experts_gate_up_{kind}", shape, (8,), [read(numbers(D), size), read(2 * F * D, size), *one(), write(numbers(2 * F), size), write(numbers(F), size), *sizes],
                     times=tiles, flop=2 * flop, least=size * (T * D + 2 * weights + 3 * T * F))
        yield Launch(f"experts_down_{kind}", shape, (8,), [read(numbers(F), size), read(F * D, size), *one(), read(order), read(tile), write(numbers(D)), *sizes],
                     times=tiles, flop=flop, least=size * (T * F + weights) + 4 * T * D)
        yield Launch(f"experts_d_act_{kind}", shape, (8,),
                     [read(numbers(D), size), read(F * D, size), *one(), read(order), read(tile), read(numbers(2 * F), size), write(numbers(2 * F), size),
                      write(numbers(F), size), write(tile * 2 * (F // tile)), *sizes], times=tiles, flop=flop,
                     least=size * (T * D + weights + 5 * T * F))
        yield Launch(f"experts_d_input_{kind}", shape, (8,), [read(numbers(2 * F), size), read(2 * F * D, size), *one(), read(order), write(numbers(D)), *sizes],
                     times=tiles, flop=2 * flop, least=size * (2 * T * F + 2 * weights) + 4 * T * D)
        yield Launch(f"experts_weight_gradient_{kind}", f"{EXPERTS} x {2 * F} x {D} over {OWN} rows", (1, 1),
                     [read(OWN * 2 * F, size), read(OWN * D, size), change(2 * F * D), read(Array.of([0], np.int64)), read(Array.of([0, OWN, OWN])), 2 * F, D],
                     times=2 * F // tile * (D // tile) * EXPERTS, flop=2 * flop, least=size * (2 * T * F + T * D) + 2 * 4 * 2 * weights)
    columns = 2 * (F // 128)
    yield Launch("experts_d_prob", f"{T} x {columns}", (ROWS // 256,), [read(ROWS * columns), read(shuffled), read(Array.of([0, ROWS, ROWS])), write(ROWS), 1, columns], times=PART)


def gemm():
    wide, narrow = f"q of attention, {T} x {Q_DIM} x {D}", f"down of the router, {T} x {ROUTER} x {D}"
    for kind, (size, result, tile) in {"bf16_f32": (2, 4, 128), "bf16_bf16": (2, 2, 128), "f32_f32": (4, 4, 64)}.items():
        operands = lambda m, n, k: [read(m * k, size), read(n * k, size)]
        def product(form, shape, m, n, k, splits=1, accumulate=0):
            parts = write(splits * m * n) if splits > 1 else None
            strides = {"nt": [k, k, n], "nn": [k, n, n], "tn": [m, n, n]}[form]
            least = size * (m * k + n * k) + (4 * splits * m * n if splits > 1 else result * m * n * (1 + accumulate))
            return Launch(f"gemm_{form}_{kind}", shape, (1, 1), [*operands(m, n, k), write(m * n, result), parts, m, n, k, *strides, splits, accumulate],
                          times=-(-m // tile) * -(-n // tile) * splits, flop=2.0 * m * n * k, least=least)
        yield product("nt", wide, T, Q_DIM, D)
        if kind == "bf16_f32":
            yield product("nt", narrow, T, ROUTER, D)
        yield product("nn", f"dx of q, {T} x {D} x {Q_DIM}", T, D, Q_DIM)
        if kind == "bf16_f32":
            yield product("nn", f"dx of the router's down, {T} x {D} x {ROUTER}", T, D, ROUTER, accumulate=1)
        # As many splits as `Gemm::splits` of the backend says.
        yield product("tn", f"dw of q, {Q_DIM} x {D} x {T}", Q_DIM, D, T, splits=4 if tile == 128 else 2)
    splits = 4
    for kind, size in (("f32", 4), ("bf16", 2)):
        yield Launch(f"gemm_reduce_{kind}", f"{splits} x {Q_DIM} x {D}", (Q_DIM * D // 4 // 256,),
                     [read(splits * Q_DIM * D), change(Q_DIM * D, size), Q_DIM, D, D, splits, 1], flop=float(splits * Q_DIM * D))


def head():
    index = Array.of(np.arange(ROWS))
    yield Launch("head_gather", f"{T} x {D}", (ROWS,), [read(ROWS * D), read(index), write(ROWS * D), D], times=PART)
    yield Launch("head_scatter", f"{T} x {D}", (ROWS,), [read(ROWS * D), read(index), write(ROWS * D), D], times=PART)
    # A chunk has at most 2^28 logits; all chunks of a micro-batch read the head once each.
    n, tiles = 960, VOCAB // 64
    chunks = T / n
    yield Launch("head_logits", f"{T} x {VOCAB} x {D}, chunks of {n}", (1,),
                 [read(n * D), read(VOCAB * D), read(n), write(n * VOCAB), write(n * tiles), write(n * tiles), write(n), n, VOCAB, D, VOCAB, 0, VOCAB],
                 times=T // 64 * tiles, flop=2.0 * T * VOCAB * D, least=4 * (T * D + chunks * VOCAB * D + T * VOCAB))
    few = 16
    yield Launch("head_normalise", f"{T} x {tiles}", (few,), [change(few * tiles), read(few * tiles), read(few), write(few), tiles, 1.0], times=T // few)
    yield Launch("head_scale", f"{T} x {VOCAB}", (-(-VOCAB // 1024), few),
                 [change(few * VOCAB), read(few * tiles), read(few), VOCAB, VOCAB, 0, VOCAB, 1.0], times=T // few, flop=float(T) * VOCAB)
    yield Launch("head_loss", f"{T} rows", (1,), [read(T), change(1, 8), T, 1])


def muon():
    for kind, size, tile in (("bf16", 2, 128), ("f32", 4, 64)):
        for form, name, rows, cols in (("tall", "an expert's gate_up", 2 * F, D), ("wide", "q of attention", Q_DIM, D)):
            short, numbers = min(rows, cols), rows * cols
            half = lambda n: n if size == 4 else n // 2
            at, places = 0, []
            for length in (numbers, half(numbers), half(numbers), short * short, half(short * short), half(short * short)):
                places.append(at)
                at += length
            if size == 4:
                places[1], places[4] = places[0], places[3]
            contents = np.array([0, 0, 0, 0, *places, rows | cols << 32], np.int64)
            table, work = read(Array.of(contents, np.int64)), Use(Array(at), "part")
            pairs, all_tiles = short // tile * (short // tile + 1) // 2, rows // tile * (cols // tile)
            grid = lambda n: read(Array.of([0, n]))
            shape = f"{name}, {rows} x {cols}"
            if kind == "bf16" and form == "tall":
                chunks, part = numbers // 4096, numbers // 4096 // 8
                gradients, squares, inverse = Array(numbers), Array(chunks, 8), Array(1)
                yield Launch("muon_mix", shape, (part,), [table, grid(chunks), read(gradients), change(numbers), work, write(squares), 1, 0.95, 1.0],
                             times=8, flop=7.0 * numbers, least=16.0 * numbers)
                yield Launch("muon_norm", shape, (1,), [grid(chunks), read(squares), write(inverse)])
                yield Launch("muon_update", shape, (part,), [table, grid(chunks), work, change(numbers), write(numbers, 2), 1, 0, 0.02, 0.1],
                             times=8, flop=3.0 * numbers, least=14.0 * numbers)
            if form == "tall":
                chunks = numbers // 4096
                yield Launch(f"muon_scale_{kind}", shape, (chunks // 8,), [table, grid(chunks), read(Array.of([1.0], np.float32)), work, 1],
                             times=8, flop=1.0 * numbers, least=(10.0 if size == 2 else 8.0) * numbers)
            gram = 2.0 * numbers * short * (short + tile) / (2 * short)
            yield Launch(f"ns_gram_{form}_{kind}", shape, (1,), [table, grid(pairs), work, 1, 0], times=pairs, flop=gram,
                         least=size * (numbers + short * short) + (4 * short * short if size == 2 else 0))
            if form == "tall":
                square = 2.0 * short ** 3 * (short + tile) / (2 * short)
                yield Launch(f"ns_square_{kind}", shape, (1,), [table, grid(pairs), work, 1], times=pairs, flop=square,
                             least=(2 * size + 4 if size == 2 else 12) * short * short)
            yield Launch(f"ns_apply_{form}_{kind}", shape, (1,), [table, grid(all_tiles), work, 1, 0], times=all_tiles, flop=2.0 * numbers * short,
                         least=size * (2 * numbers + short * short) + (8 * numbers if size == 2 else 0))


def adamw():
    n = 1 << 20
    yield Launch("adamw", f"embedding, {VOCAB} x {D}", (n // 1024,),
                 [change(n), read(n), change(n), change(n), write(n, 2), Long(n), 1e-3, 0.9, 0.95, 1e-8, 1.0, 0.1, 0.05, 1.0],
                 times=VOCAB * D / n, flop=15.0 * VOCAB * D)


def embedding():
    ids = Array.of(np.random.default_rng(3).integers(0, VOCAB, T))
    table = Array(VOCAB * D)
    yield Launch("embedding_fwd", f"{T} x {D}", (ROWS,), [read(ids), read(table), write(ROWS * D), D], times=PART, least=T * (8.0 * D + 4))
    keys = Array(T, 8)
    yield Launch("embedding_keys", f"{T} rows", (T // 256,), [read(ids), write(keys), T, T, -1])
    size = 2 * 1024
    block = lambda a, b: Launch("embedding_sort_block", f"{T} rows", (T // 1024,), [change(keys), T, a, b])
    yield block(2, 1024)
    while size <= T:
        distance = size // 2
        while distance >= 1024:
            yield Launch("embedding_sort_step", f"{T} rows", (T // 512,), [change(keys), T, size, distance])
            distance //= 2
        yield block(size, size)
        size *= 2
    # The first rows in the order of their tokens: some tokens occur twice.
    yield Launch("embedding_bwd", f"{T} x {D}", (ROWS, D // 256), [read(keys), read(T * D), change(table), ROWS, D], times=PART, flop=1.0 * T * D,
                 least=12.0 * T * D)


def elementwise():
    n, d = ROWS * D, D
    grid, count, shape = (n // 256,), Long(n), f"{T} x {D}"
    valid = Array.of(np.ones(ROWS), np.uint8)
    for kernel, args, flop in (
        ("fill", [write(n), 0.0, count], 0),
        ("add_assign", [change(n), read(n), count], 1),
        ("add_assign_bf16", [change(n), read(n, 2), count], 1),
        ("cast_f32_bf16", [read(n), write(n, 2), count], 0),
        ("cast_bf16_f32", [read(n, 2), write(n), count], 0),
        ("affine_fwd", [read(n), read(d), read(d), write(n), count, d], 2),
    ):
        yield Launch(kernel, shape, grid, args, times=PART, flop=flop * T * D)
    # No row is padding: nothing is written.
    for kernel in ("mask_rows", "mask_rows_bf16"):
        yield Launch(kernel, shape + ", no padding", grid, [Use(Array(n), "part"), read(valid), count, d], times=PART, least=T)
    blocks = ROWS // 64
    yield Launch("affine_bwd", shape, (d // 256, blocks), [read(n), read(d), read(d), read(n), write(n), write(blocks * 2 * d), ROWS, d, 64],
                 times=PART, flop=5.0 * T * D)
    blocks = T // 64
    yield Launch("affine_params", f"{blocks} x 2 x {D}", (d // 256,), [read(blocks * 2 * d), read(d), change(d), change(d), blocks, d])
    yield Launch("copy_runs", shape, grid, [read(n), write(n), count, D, 1, Long(D), Long(D)], times=PART)
    per_block = 1 << 14
    yield Launch("sum_of_squares", f"embedding, {VOCAB} x {D}", (n // per_block,), [read(n), write(n // per_block, 8), count, per_block],
                 times=VOCAB * D / n, flop=2.0 * VOCAB * D)
    blocks = VOCAB * D // per_block
    yield Launch("sum_f64", f"{blocks} numbers", (1,), [read(blocks, 8), write(1, 8), blocks])


def stream():
    n = 1 << 21
    vectors, groups, sums = Long(n // 4), n // 4096, write(n // 1024)
    shape, times = "1 GiB arrays", (1 << 28) / n
    for kernel, args in (
        ("stream_read", [read(n), sums, vectors]),
        ("stream_write", [write(n), 1.0, vectors]),
        ("stream_copy", [read(n), write(n), vectors]),
        ("stream_triad", [read(n), read(n), write(n), 0.5, vectors]),
        ("stream_random", [read(n), sums, vectors, n // 16 - 1]),
    ):
        yield Launch(kernel, shape, (groups,), args, times=times)


FAMILIES = {
    "residual_norm": residual_norm, "cca_mix": cca_mix, "attention": attention, "router": router, "experts": experts, "gemm": gemm,
    "cross_entropy": head, "newton_schulz": muon, "adamw": adamw, "embedding": embedding, "elementwise": elementwise, "stream": stream,
}
