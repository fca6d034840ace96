"""Times one kernel in one way and prints the seconds of a call, as one line of JSON.

    python kernel_worker.py '{"kind": "gemm", "m": 4096, ..., "precision": "bf16", "way": "linear", "seconds": 0.5, "threads": 2}'
"""

import json
import sys
import time
from statistics import median

import torch
import torch.nn.functional as F
from loss import Chunked

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def plain_loss(x, w, labels, widen):
    logits = F.linear(x, w)
    return F.cross_entropy(logits.float() if widen else logits, labels)


def linear_ce(spec, dtype):
    """Forward and backward; the gradients of x and w are made. Weights are f32 and cast in every call, as in training."""
    x = torch.randn(spec["tokens"], spec["dim"]).to(dtype).requires_grad_()
    w = (torch.randn(spec["vocab"], spec["dim"]) * 0.02).requires_grad_()
    labels = torch.randint(0, spec["vocab"], (spec["tokens"],))
    name, _, rest = spec["way"].partition(":")
    loss = torch.compile(plain_loss) if name.endswith("-compiled") else plain_loss

    def call():
        x.grad = w.grad = None
        cast = w.to(dtype)
        (Chunked.apply(x, cast, labels, int(rest)) if name == "chunked" else loss(x, cast, labels, name.startswith("widened"))).backward()

    return call


def attention(spec, dtype):
    """Causal, forward and backward."""

    def random(heads):
        return torch.randn(spec["batch"], spec["seq"], heads, spec["head_dim"]).to(dtype).transpose(1, 2).requires_grad_()

    q, k, v = random(spec["heads"]), random(spec["kv_heads"]), random(spec["kv_heads"])
    if spec["way"] == "contiguous":
        q, k, v = (t.detach().contiguous().requires_grad_() for t in (q, k, v))
    g = torch.randn(q.shape).to(dtype)

    def call():
        q.grad = k.grad = v.grad = None
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=spec["heads"] != spec["kv_heads"]).backward(g)

    return call


def gemm(spec, dtype):
    """y = x w^T: x [m, k], w [n, k], both in the precision already."""
    x, w = torch.randn(spec["m"], spec["k"]).to(dtype), torch.randn(spec["n"], spec["k"]).to(dtype)
    y = torch.empty(spec["m"], spec["n"], dtype=dtype)
    return (lambda: torch.mm(x, w.t(), out=y)) if spec["way"] == "mm into place" else (lambda: F.linear(x, w))


def least_seconds(spec, dtype):
    """A floor of a call's time, from a slice of its forward product: tells a hopeless dtype without a whole call."""
    if spec["kind"] != "linear_ce":
        return 0.0
    x, w = torch.randn(64, spec["dim"]).to(dtype), torch.randn(spec["vocab"], spec["dim"]).to(dtype)
    begun = time.perf_counter()
    torch.mm(x, w.t())
    return (time.perf_counter() - begun) * spec["tokens"] / 64


def main():
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(1)
    call = {"linear_ce": linear_ce, "attention": attention, "gemm": gemm}[spec["kind"]](spec, DTYPES[spec["precision"]])
    least = least_seconds(spec, DTYPES[spec["precision"]])
    if spec.get("hopeless_s") and least > spec["hopeless_s"]:
        print(json.dumps({"hopeless_s": least}))
        return
    for number in range(2):
        begun = time.perf_counter()
        call()
        once = time.perf_counter() - begun
        # the first call may compile
        if spec.get("hopeless_s") and once > spec["hopeless_s"] and (number > 0 or not spec["way"].endswith("-compiled")):
            print(json.dumps({"hopeless_s": once}))
            return
    calls = max(1, int(2e-3 / once))
    wall, cpu, end = [], [], time.perf_counter() + spec["seconds"]
    while len(wall) < 3 or time.perf_counter() < end:
        w, c = time.perf_counter(), time.process_time()
        for _ in range(calls):
            call()
        wall.append((time.perf_counter() - w) / calls)
        cpu.append((time.process_time() - c) / calls)
    print(json.dumps({"median_s": median(wall), "cpu_s": median(cpu)}))


if __name__ == "__main__":
    main()
