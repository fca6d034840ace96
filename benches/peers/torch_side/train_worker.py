"""Trains one configuration of a peer for some steps and prints what they cost, as one line of JSON.

    python train_worker.py '{"model": "tuned", "precision": "bf16", ...}'       (written by ../training.py)

A step is what zaya's is: forward and backward of every micro-batch, clipping, Muon and AdamW; weights and optimizer state are f32.
"""

import contextlib
import json
import resource
import sys
import time
from array import array

import torch
from optim import MuonAdamW
from safetensors.torch import load_file


def build(spec):
    state = load_file(spec["init"] + "/model.safetensors")
    if spec["model"] == "hf":
        import hf

        model = hf.build(spec["shape"], 0, spec["how"]["experts"])
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        return hf.Peer(model, spec["compiled"])
    from model import TunedZaya

    return TunedZaya(spec["shape"], state, spec["how"], spec["compiled"])


def read_tokens(path, count):
    """The first `count` ids of a shard (little-endian uint16), repeated if it has fewer."""
    ids = array("H")
    with open(path, "rb") as file:
        ids.frombytes(file.read(2 * count))
    tokens = torch.tensor(ids, dtype=torch.long)
    return tokens.repeat(-(-count // len(tokens)))[:count]


def peak_rss():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main():
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    imported = peak_rss()
    bf16 = spec["precision"] == "bf16"
    model = build(spec)
    optimizer = MuonAdamW(model.named_weights(), 1e-4, torch.bfloat16 if bf16 else torch.float32)
    seq, batch, micro = spec["seq_len"], spec["tokens"] // spec["seq_len"], spec["micro_batch"]
    steps = spec["warmup"] + spec["steps"]
    data = read_tokens(spec["data"], (batch * (seq + 1)) * min(steps, 8)).view(-1, batch, seq + 1)

    def step(number):
        rows = data[number % len(data)]
        total = 0.0
        with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
            for part in rows.split(micro):
                loss = model(part[:, :-1].contiguous(), part[:, 1:].contiguous()) * (len(part) / batch)
                loss.backward()
                total += float(loss.detach())
        optimizer.step()
        return total

    hopeless = spec.get("hopeless_s")
    if hopeless and (least := optimizer.least_seconds()) > hopeless:
        print(json.dumps({"hopeless_s": least}))
        return
    losses, walls = [], []
    for number in range(steps):
        if number == spec["warmup"]:
            wall, cpu = time.perf_counter(), time.process_time()
        begun = time.perf_counter()
        losses.append(step(number))
        walls.append(time.perf_counter() - begun)
        # The first step may compile; the second tells the speed.
        if hopeless and walls[-1] > hopeless and (number > 0 or not spec["compiled"]):
            print(json.dumps({"hopeless_s": walls[-1]}))
            return
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = spec["steps"] * spec["tokens"]
    print(json.dumps({
        "tokens_per_s": tokens / wall, "tokens_per_cpu_s": tokens / cpu, "peak_rss": peak_rss(), "rss_after_import": imported,
        "first_step_s": walls[0], "step_s": walls[spec["warmup"]:], "losses": losses,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
