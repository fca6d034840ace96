#!/usr/bin/env python3
"""zaya eval against lm-evaluation-harness (Hugging Face model class) on this machine's CPU: one checkpoint, float32, the same requests.

  python benches/vs_lm_eval.py --data FOLDER                    every case
  python benches/vs_lm_eval.py --data FOLDER --cases mmlu arc   only these
  python benches/vs_lm_eval.py --data FOLDER --rounds 3         best of three

FOLDER holds the tasks' data files, named as docs/EVAL.md says. zaya runs first and logs its requests; lm-eval then answers the same
strings. zaya's CPU seconds are those of its whole process (loading, templates, tokenizing, writing results); lm-eval's are those of the
one call that answers: neither its imports, nor loading, nor its tasks. Log-probabilities beyond the tolerance are near ties of a router:
in double precision now one side, now the other turns out to have gone to the wrong expert.

Needs a built zaya (`make build`), Python 3.10 or newer and Linux; lm-eval, PyTorch and transformers are installed in a virtual
environment.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import machine  # noqa: E402
import pyenv  # noqa: E402
from children import TUNED_MALLOC, PASSIVE, Failed, clean_env, run_json  # noqa: E402

ROOT = HERE.parent
PACKAGES = ("torch", "transformers>=5.13", "lm-eval==0.4.13", "accelerate", "numpy")
PROBE = "import torch, transformers, lm_eval.models.huggingface; from transformers import ZayaForCausalLM; print(torch.__version__, transformers.__version__)"
TOLERANCE = 1e-3, 1e-5

# Tasks, shots, documents of each task, further options, batch of lm-eval, what is compared, least ratio wanted.
CASES = {
    "mmlu": ("mmlu", 5, 4, {}, 8, 3.0),
    "arc": ("arc_challenge", 25, 30, {}, 8, 2.0),
    "hellaswag": ("hellaswag", 0, 60, {}, 8, 1.5),
    "bbh": ("bbh_cot_fewshot", None, 4, {"--gen-kwargs": "max_gen_toks=1"}, 8, 3.0),
    "lambada": ("lambada_openai", 0, 200, {}, 8, 1.0),
    "rolling": ("wikitext", 0, 4, {}, 8, 1.0),
    "generation": ("gsm8k", 5, 16, {"--gen-kwargs": "max_gen_toks=96"}, 4, 1.0),
}


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", required=True, help="folder with the tasks' data")
    p.add_argument("--zaya", default=str(ROOT / "target/release/zaya"), help="the executable (default: target/release/zaya)")
    p.add_argument("--venv", default=str(HERE / ".venv-lm-eval"), help="virtual environment, made if it is not there (default: benches/.venv-lm-eval)")
    p.add_argument("--pip-args", default="", help="further options of `pip install`")
    p.add_argument("--work", default=str(HERE / ".work/lm_eval"), help="folder for the model and the runs (default: benches/.work/lm_eval)")
    p.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="default: all")
    p.add_argument("--threads", type=int, default=2, help="threads of both sides (default: 2)")
    p.add_argument("--rounds", type=int, default=1, help="runs of each side, of which the best counts (default: 1)")
    p.add_argument("--limit", type=int, help="documents of each task, in place of the case's own number")
    p.add_argument("--timeout", type=float, default=1800.0, help="seconds that one child process may take (default: 1800)")
    p.add_argument("--json", help="also write everything to this file")
    return p.parse_args()


def model(python, work):
    """A random checkpoint with the tokenizer of the tests."""
    folder = work / "model"
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        packed, plain = ROOT / "tests/fixtures/eval/tokenizer.json.zst", work / "tokenizer.json"
        unpack = "import sys, zstandard; open(sys.argv[2], 'wb').write(zstandard.ZstdDecompressor().stream_reader(open(sys.argv[1], 'rb')).read())"
        subprocess.run([python, "-c", unpack, str(packed), str(plain)], check=True)
        run_json([python, str(HERE / "peers/lm_eval_side/make_model.py"), str(plain), str(folder)], {}, 600)
    return folder


def worked_examples(work):
    """The worked examples of BIG-Bench Hard, which are no part of its data."""
    folder = work / "shots"
    if not (folder / "bbh_snarks_shots.jsonl").exists():
        subprocess.run([str(ROOT / "scripts/eval-shots.sh"), str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder


def zaya(args, case, folder, out):
    """One run of `zaya eval`: CPU and wall seconds of the process, and what its results say."""
    tasks, shots, limit, more, _, _ = CASES[case]
    shutil.rmtree(out, ignore_errors=True)
    command = [args.zaya, "eval", "--model", folder, "--tasks", tasks, "--data", args.data, "--limit", args.limit or limit, "--output", out,
               "--log-requests", "--threads", args.threads]  # fmt: skip
    command += ["--data", worked_examples(out.parent)] if case == "bbh" else []
    command += [] if shots is None else ["--num-fewshot", shots]
    command += [word for pair in more.items() for word in pair]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run([str(c) for c in command], env=clean_env(), capture_output=True, text=True, timeout=args.timeout, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 3):
        raise Failed(f"zaya: exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    block = json.loads((out / "results.json").read_text())["zaya"]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu, "wall_s": time.monotonic() - start, "tokens": block["tokens"]}


def lm_eval(args, python, case, folder, out):
    spec = {"model": str(folder), "requests": str(out / "requests.jsonl"), "threads": args.threads, "batch": CASES[case][4], "max_length": 2048}
    env = TUNED_MALLOC | PASSIVE | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
                                    "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
    return run_json([python, str(HERE / "peers/lm_eval_side/worker.py"), json.dumps(spec)], env, args.timeout)


def agreement(out, theirs):
    """Largest difference of log-probabilities, or how many texts are equal."""
    with open(out / "requests.jsonl", encoding="utf-8", newline="\n") as file:
        records = [json.loads(line) for line in file]
    if "texts" in theirs:
        return f"{sum(r['text'] == t for r, t in zip(records, theirs['texts']))} of {len(records)} texts equal"
    worst = max(abs(r["logprob"] - lp) for r, lp in zip(records, theirs["logprobs"]))
    beyond = sum(abs(r["logprob"] - lp) > TOLERANCE[0] + TOLERANCE[1] * abs(lp) for r, lp in zip(records, theirs["logprobs"]))
    return f"|d logprob| <= {worst:.1e}" + (f", {beyond} BEYOND TOLERANCE" if beyond else "")


def main():
    args = arguments()
    work = Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    try:
        python, versions = pyenv.ensure(args.venv, args.pip_args.split(), PACKAGES, PROBE)
        folder = model(python, work)
    except (RuntimeError, Failed, subprocess.CalledProcessError) as e:
        sys.exit(str(e))
    cpu = machine.cpu()
    print(f"{machine.describe(cpu)}; torch {versions[0]}, transformers {versions[1]}, lm-eval 0.4.13; {args.threads} threads, load "
          f"{machine.load():.1f}\n\n| case | requests | zaya, requests per CPU s | lm-eval | ratio | wanted | forward tokens | agreement |\n"
          "|---|---|---|---|---|---|---|---|", flush=True)  # fmt: skip
    report = {"cpu": cpu, "torch": versions[0], "transformers": versions[1], "cases": {}}
    failed = False
    for case in args.cases:
        out = work / case
        try:
            ours = min((zaya(args, case, folder, out) for _ in range(args.rounds)), key=lambda r: r["cpu_s"])
            theirs = min((lm_eval(args, python, case, folder, out) for _ in range(args.rounds)), key=lambda r: r["cpu_s"])
        except (Failed, OSError, KeyError, subprocess.SubprocessError) as e:
            print(f"| {case} | {e} |", flush=True)
            failed = True
            continue
        n, wanted = theirs["requests"], CASES[case][5]
        ratio = theirs["cpu_s"] / ours["cpu_s"]
        agree = agreement(out, theirs)
        print(f"| {case} | {n} | {n / ours['cpu_s']:.1f} | {n / theirs['cpu_s']:.1f} | {ratio:.2f} | {wanted} | {ours['tokens']['forward']} | {agree} |", flush=True)
        report["cases"][case] = {"ratio": ratio, "wanted": wanted, "zaya": ours, "agreement": agree,
                                 "lm_eval": {k: theirs[k] for k in ("cpu_s", "wall_s", "requests")}}  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + os.linesep)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
