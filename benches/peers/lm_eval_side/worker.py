"""lm-eval's Hugging Face model class on the requests of one run: worker.py SPEC, a JSON object.

Reads the strings of requests.jsonl, answers them as lm-eval does, and prints CPU seconds (user and system, of the call alone: neither
imports nor loading count), wall seconds and, for log-likelihoods, the answers.
"""

import json
import resource
import sys
import time

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM


def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def instance(kind, i, arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=i, metadata=("bench", i, 1))


def rolling(lm, windows):
    """Windows as `_loglikelihood_tokens` gets them from `loglikelihood_rolling`."""
    return lm._loglikelihood_tokens([((None, None), w["context_enc"], w["continuation_enc"]) for w in windows], disable_tqdm=True)


def main():
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    lm = HFLM(pretrained=spec["model"], device="cpu", dtype="float32", batch_size=spec["batch"], max_length=spec["max_length"])
    with open(spec["requests"], encoding="utf-8", newline="\n") as file:
        records = [json.loads(line) for line in file]
    kind = records[0]["type"]
    if kind == "generate_until":
        instances = [instance(kind, i, (r["context"], dict(r["gen_kwargs"]))) for i, r in enumerate(records)]
        call = lambda: lm.generate_until(instances, disable_tqdm=True)  # noqa: E731
    elif kind == "rolling_window":
        call = lambda: rolling(lm, records)  # noqa: E731
    else:
        instances = [instance(kind, i, (r["context"], r["continuation"])) for i, r in enumerate(records)]
        call = lambda: lm.loglikelihood(instances, disable_tqdm=True)  # noqa: E731
    cpu, wall = cpu_s(), time.monotonic()
    answers = call()
    out = {"cpu_s": cpu_s() - cpu, "wall_s": time.monotonic() - wall, "requests": len(records)}
    if kind == "generate_until":
        out["texts"] = answers
    else:
        out["logprobs"] = [a[0] for a in answers]
    print(json.dumps(out))


main()
