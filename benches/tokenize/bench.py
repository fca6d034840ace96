"""Times zaya's tokenizer and its vocabulary training beside others. Started by run.sh, which makes what it needs.

Engines take turns, a process each, round by round; what is printed are medians. Times are CPU time on one thread; 1 MB is 10^6 bytes
of UTF-8. Ids and merges are compared with those of `tokenizers` 0.23.
"""

import argparse
import hashlib
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
REFERENCE = "tokenizers 0.23"


def call(command):
    """Runs a command, and returns what it prints, its CPU seconds and its largest memory in MB."""
    process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | ONE_THREAD)
    output, errors = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {process.returncode}")
    return output.decode(), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


def sha256(path):
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.unlink()
    return digest


def encoding_engines(options):
    bench = options.bench_binary
    peer = lambda python, name: [python, HERE / "peers.py", name]
    return {
        "zaya": [bench, "passes"],
        "gigatoken": peer(options.python, "gigatoken"),
        "fastokens": peer(options.python, "fastokens"),
        "tokenizers 1.0-rc": peer(options.python_rc, "tokenizers"),
        REFERENCE: peer(options.python, "tokenizers"),
    }


def encoding(options, tokenizer):
    documents = options.work / "documents"
    size = int(call([options.bench_binary, "mix", documents, options.megabytes * 1_000_000, *options.corpus])[0])
    engines, results = encoding_engines(options), {}
    for round in range(options.rounds):
        for name, command in engines.items():
            # The slow ones are asked less often: they are not what the figure is about.
            slow = name.startswith("tokenizers")
            if "skipped" in results.get(name, {}) or (slow and round > 0):
                continue
            ids = options.work / "ids"
            arguments = [tokenizer, documents, 2 if slow else options.passes, *([ids] if round == 0 else [])]
            try:
                found = json.loads(call([*command, *arguments])[0])
            except RuntimeError as error:
                results[name] = {"skipped": str(error)}
                continue
            entry = results.setdefault(name, {"version": found["version"], "tokens": found["tokens"], "rounds": []})
            if round == 0:
                entry["ids_sha256"] = sha256(ids)
            entry["rounds"].append({clock: found[clock] for clock in ("thread", "process")})
            print(f"  {tokenizer.stem} round {round + 1}: {name} {size / 1e6 / found['thread'][0]:.1f} MB/s", file=sys.stderr)
    for entry in results.values():
        if "rounds" in entry:
            speed = lambda seconds: size / 1e6 / seconds
            entry["first_mb_s"] = statistics.median(speed(r["thread"][0]) for r in entry["rounds"])
            entry["steady_mb_s"] = statistics.median(speed(s) for r in entry["rounds"] for s in r["thread"][1:])
            entry["equal"] = entry["ids_sha256"] == results[REFERENCE].get("ids_sha256")
    return {"tokenizer": tokenizer.stem, "bytes": size, "engines": results}


def training(options):
    text = options.work / "corpus.txt"
    size = int(call([options.bench_binary, "text", text, options.train_megabytes * 1_000_000, *options.corpus])[0])
    learned = options.work / "learned.json"
    vocabulary = str(options.vocabulary)
    flags = ["--input", text, "--output", learned, "--overwrite", "--workers", "1"]
    engines = {
        "zaya": [options.zaya, "tokenize", "--train-vocab", vocabulary, *flags],
        "gigabpe": [options.python, HERE / "trainers.py", "gigabpe", vocabulary, text, learned],
        REFERENCE: [options.python, HERE / "trainers.py", "tokenizers", vocabulary, text, learned],
    }
    results = {}
    for round in range(options.rounds):
        for name, command in engines.items():
            if "skipped" in results.get(name, {}) or (name == REFERENCE and round > 0):
                continue
            try:
                _, seconds, megabytes = call(command)
            except RuntimeError as error:
                results[name] = {"skipped": str(error)}
                continue
            merges = json.loads(learned.read_text())
            merges = merges["model"]["merges"] if isinstance(merges, dict) else merges
            entry = results.setdefault(name, {"seconds": [], "peak_mb": []})
            entry["merges_sha256"] = hashlib.sha256(json.dumps(merges).encode()).hexdigest()
            entry["seconds"].append(seconds)
            entry["peak_mb"].append(megabytes)
            print(f"  training round {round + 1}: {name} {seconds:.2f} s, {megabytes:.0f} MB", file=sys.stderr)
    for entry in results.values():
        if "seconds" in entry:
            entry["median_seconds"] = statistics.median(entry["seconds"])
            entry["median_peak_mb"] = statistics.median(entry["peak_mb"])
            entry["equal"] = entry["merges_sha256"] == results[REFERENCE].get("merges_sha256")
    return {"bytes": size, "vocabulary": options.vocabulary, "engines": results}


def machine():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    field = lambda name: next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "unknown")
    flags = field("flags").split()
    vectors = "AVX-512" if "avx512bw" in flags else "AVX2" if "avx2" in flags else "none"
    return {"system": platform.platform(), "processor": field("model name"), "vectors": vectors, "cores": os.cpu_count(), "load": os.getloadavg()}


def tables(report):
    for result in report["encoding"]:
        print(f"\n{result['tokenizer']}, {result['bytes'] / 1e6:.1f} MB\n\n| engine | first pass, MB/s | steady, MB/s | ids |\n|---|---|---|---|")
        for name, entry in result["engines"].items():
            if "skipped" in entry:
                print(f"| {name} | does not run: {entry['skipped'][:100]} | | |")
            else:
                same = "equal" if entry["equal"] else "differ"
                print(f"| {name} ({entry['version']}) | {entry['first_mb_s']:.1f} | {entry['steady_mb_s']:.1f} | {same} |")
    if report["training"]:
        result = report["training"]
        print(f"\ntraining, {result['bytes'] / 1e6:.1f} MB, {result['vocabulary']} entries\n\n| trainer | CPU s | peak MB | merges |\n|---|---|---|---|")
        for name, entry in result["engines"].items():
            if "skipped" in entry:
                print(f"| {name} | does not run: {entry['skipped'][:100]} | | |")
            else:
                same = "equal" if entry["equal"] else "differ"
                print(f"| {name} | {entry['median_seconds']:.2f} | {entry['median_peak_mb']:.0f} | {same} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    paths = {"type": pathlib.Path, "required": True}
    parser.add_argument("--corpus", nargs="+", type=pathlib.Path, required=True, help="JSONL files with a field `text`, also .zst")
    parser.add_argument("--tokenizer", nargs="*", type=pathlib.Path, default=[], help="tokenizer.json files")
    parser.add_argument("--megabytes", type=int, default=20, help="text for encoding, taken evenly from all corpora")
    parser.add_argument("--train-megabytes", type=int, default=100, help="text for training; 0: no training")
    parser.add_argument("--vocabulary", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("tokenize-bench.json"))
    parser.add_argument("--zaya", **paths)
    parser.add_argument("--bench-binary", **paths)
    parser.add_argument("--python", **paths)
    parser.add_argument("--python-rc", **paths)
    parser.add_argument("--work", **paths)
    options = parser.parse_args()
    report = {"machine": machine(), "encoding": [encoding(options, tokenizer) for tokenizer in options.tokenizer]}
    report["training"] = training(options) if options.train_megabytes else None
    options.json.write_text(json.dumps(report, indent=2) + "\n")
    tables(report)


main()
