#!/usr/bin/env python3
"""zaya against PyTorch on this machine's CPU: the same ZAYA model, weights and tokens, side by side in alternating rounds.

  python benches/vs_pytorch.py                                  the training step, at 4,096 and at 32,768 tokens
  python benches/vs_pytorch.py --tokens 4096 --rounds 5
  python benches/vs_pytorch.py --peers tuned-bf16 hf-bf16       only these
  python benches/vs_pytorch.py --check                          only compare the tuned peer's gradients with transformers'
  python benches/vs_pytorch.py --kernels                        single kernels instead of the step

Needs a built zaya (`make build`), Python 3.9 or newer and Linux. PyTorch and transformers are installed in a virtual environment.
docs/BENCH_PYTORCH.md says what is compared and how.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import corpus  # noqa: E402
import kernels  # noqa: E402
import machine  # noqa: E402
import pyenv  # noqa: E402
import tables  # noqa: E402
import training  # noqa: E402
import zaya_side  # noqa: E402
from children import PASSIVE, TUNED_MALLOC, Failed, run_json  # noqa: E402
from shape import BENCH_15M  # noqa: E402

ROOT = HERE.parent
# Relative error of a gradient in f32 beyond which the tuned peer is no longer the same model
TOLERANCE, TEMPERATURE_TOLERANCE, LOSS_TOLERANCE = 1e-4, 1e-3, 1e-4


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--zaya", default=str(ROOT / "target/release/zaya"), help="the executable (default: target/release/zaya)")
    p.add_argument("--venv", default=str(HERE / ".venv"), help="virtual environment, made if it is not there (default: benches/.venv)")
    p.add_argument("--pip-args", default="", help='further options of `pip install`, e.g. --pip-args="--index-url URL" for wheels without CUDA')
    p.add_argument("--work", default=str(HERE / ".work"), help="folder for data, weights and runs (default: benches/.work)")
    p.add_argument("--recipe", default=str(ROOT / "recipes/bench-cpu.toml"), help="zaya's recipe; its model must be preset bench-15m")
    p.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768], help="tokens a step (default: 4096 32768)")
    p.add_argument("--seq-len", type=int, default=512, help="tokens of a sequence (default: 512)")
    p.add_argument("--threads", type=int, default=2, help="threads of both sides (default: 2)")
    p.add_argument("--rounds", type=int, default=3, help="alternating rounds (default: 3)")
    p.add_argument("--steps", type=int, help="measured steps of a round (default: 40960 tokens' worth, at least 3)")
    p.add_argument("--tuning-steps", type=int, default=2, help="measured steps while a peer is tuned (default: 2)")
    p.add_argument("--peers", nargs="+", choices=list(training.PEERS), default=list(training.PEERS), help="default: all")
    p.add_argument("--finalists", type=int, default=0, help="take only the N fastest peers to the rounds (default: all that are not hopeless)")
    p.add_argument("--quick", action="store_true", help="do not tune the peers: first choice of everything")
    p.add_argument("--choose-by", choices=("wall", "cpu"), default="wall", help="what tuning goes by; cpu is steadier on a busy machine")
    p.add_argument("--hopeless", type=float, default=10.0, help="leave out what is so many times slower than the fastest so far (default: 10)")
    p.add_argument("--timeout", type=float, default=1800.0, help="seconds that one child process may take (default: 1800)")
    p.add_argument("--zaya-precisions", nargs="+", choices=("f32", "bf16"), default=["f32", "bf16"], help="default: both")
    p.add_argument("--zaya-by", choices=("pretrain", "bench"), default="pretrain",
                   help="a real run on the peers' data and weights, or `zaya bench --parts step` (default: pretrain)")  # fmt: skip
    p.add_argument("--kernels", action="store_true", help="single kernels instead of the step")
    p.add_argument("--kernel-cases", default="", metavar="TEXT", help="only kernels whose name contains this, e.g. gemm (default: all)")
    p.add_argument("--kernel-seconds", type=float, default=0.5, help="seconds of one kernel measurement (default: 0.5)")
    p.add_argument("--check", action="store_true", help="only check the tuned peer against transformers")
    p.add_argument("--no-check", action="store_true", help="begin timing without that check")
    p.add_argument("--json", help="also write everything to this file")
    args = p.parse_args()
    for tokens in args.tokens:
        if tokens < args.seq_len or tokens % (args.seq_len * min(8, tokens // args.seq_len)):
            p.error(f"--tokens {tokens}: expected a multiple of {args.seq_len * 8}, the tokens of zaya's micro-batch, or {args.seq_len} times less than 8")
    if args.seq_len > BENCH_15M["max_position_embeddings"]:
        p.error(f"--seq-len {args.seq_len}: the model ends at {BENCH_15M['max_position_embeddings']}")
    if not args.check and not os.access(args.zaya, os.X_OK):
        p.error(f"{args.zaya} is no executable: build zaya (`make build`), or name one with --zaya PATH")
    return args


def worker(python, args, script, spec):
    env = TUNED_MALLOC | PASSIVE | {"OMP_NUM_THREADS": str(args.threads), "TORCHINDUCTOR_COMPILE_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(Path(args.work).resolve() / "inductor")
    return run_json([python, str(HERE / "peers/torch_side" / script), json.dumps(spec)], env, args.timeout)


def check(python, args, compiles):
    """The table, and whether the tuned peer may be called the same model."""
    report = worker(python, args, "check.py", {"shape": BENCH_15M, "threads": args.threads, "compiled": [False, True] if compiles else [False]})
    good = [r for r in report["rows"] if "error" not in r]
    right = bool(good) and all(
        r["loss"] <= LOSS_TOLERANCE and r["gradient"] <= TOLERANCE and r["temperatures"] <= TEMPERATURE_TOLERANCE for r in good
    )
    text = (f"Loss {report['loss']:.6f} and gradients of {report['parameters']} tensors against transformers', f32, 256 tokens. The blocks use "
            f"{', '.join(map(str, report['classes_used']))} of 17 classes; {report['skipped_tokens']} of 1024 routes go to the skip class.\n\n{tables.check(report)}")  # fmt: skip
    return report, text, right


def main():
    args = arguments()
    # an end by signal goes the way of Ctrl-C, on which the running child is ended too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    notes = []
    try:
        python, (torch_version, transformers_version) = pyenv.ensure(args.venv, args.pip_args.split())
    except RuntimeError as why:
        sys.exit(f"error: {why}")
    no_compiler = pyenv.compiler_missing()
    if no_compiler:
        notes.append(f"{no_compiler}; the compiled peers are left out")
        args.peers = [p for p in args.peers if not p.endswith("-compile")]
    cpu = machine.cpu()
    out = {"cpu": cpu, "torch": torch_version, "transformers": transformers_version, "load_before": machine.load()}
    out |= {"unix_time": time.time(), "options": vars(args)}
    print(f"CPU: {machine.describe(cpu)}; load {out['load_before']:.1f} before  \n"
          f"torch {torch_version}, transformers {transformers_version}, {args.threads} threads\n", flush=True)  # fmt: skip
    Path(args.work).mkdir(parents=True, exist_ok=True)
    try:
        code = measure(args, python, not no_compiler, out, notes)
    except Failed as why:
        sys.exit(f"error: {why}")
    out["notes"], out["load_after"] = notes, machine.load()
    if notes:
        print("\nNotes\n")
        print("\n".join(f"* {n}" for n in notes))
    print(f"\nload {out['load_after']:.1f} after")
    if args.json:
        Path(args.json).write_text(json.dumps(out, indent=1) + "\n")
    sys.exit(code)


def measure(args, python, compiles, out, notes):
    if args.check or not (args.no_check or args.kernels):
        out["check"], text, right = check(python, args, compiles and (args.check or any(p.endswith("-compile") for p in args.peers)))
        print(f"## The tuned peer is the same model\n\n{text}\n", flush=True)
        if not right:
            print("error: the tuned peer differs from transformers' model; its times would mean nothing", file=sys.stderr)
            return 1
    if args.check:
        return 0
    if args.kernels:
        out["kernels"] = kernels.measure(args, python, compiles, notes)
        print(f"## Kernels\n\n{tables.kernels(out['kernels'])}\n\nRatios are torch's time over zaya's: above 1, zaya is faster.")
        return 0
    if args.zaya_by == "bench" and not zaya_side.has_bench(args.zaya):
        sys.exit(f"error: {args.zaya} has no `bench`; use --zaya-by pretrain")
    work = Path(args.work).resolve()
    data = corpus.write(args.zaya, work / "data", BENCH_15M["vocab_size"], 400_000)
    init = work / "init"
    out["init"] = worker(python, args, "init_worker.py", {"shape": BENCH_15M, "seed": 1, "threads": args.threads, "out": str(init), "seq_len": args.seq_len})
    shares = ", ".join(f"{100 * s:.0f}%" for s in out["init"]["busiest_expert_share"])
    print(f"The busiest expert of each block gets {shares} of the tokens at the start (even: {100 / BENCH_15M['num_experts']:.0f}%).\n", flush=True)
    out["training"] = []
    for tokens in args.tokens:
        block = training.run(args, python, data, init, tokens, notes)
        text, block["ratios"] = tables.training(block)
        out["training"].append(block)
        print(f"## {tokens} tokens a step\n\n{args.rounds} rounds of {block['steps']} steps; peers with {block['environment']}.\n\n{text}\n", flush=True)
    return 0


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
