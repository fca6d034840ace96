#!/bin/sh
# Writes the worked examples of BIG-Bench Hard and GSM8K, and TruthfulQA's preamble, into a folder: other people's text, which this
# repository does not hold. They are taken from lm-evaluation-harness's own package. Needs python3 with pip, and a network.
#
#   scripts/eval-shots.sh FOLDER
set -eu

version=0.4.13
[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
mkdir -p "$1"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m pip download --quiet --no-deps --dest "$scratch" "lm_eval==$version"
python3 -m pip install --quiet --target "$scratch/yaml" pyyaml
PYTHONPATH="$scratch/yaml" python3 - "$scratch"/lm_eval-*.whl "$1" <<'PY'
import json
import pathlib
import re
import sys
import zipfile

import yaml

# Tasks may name Python functions, which are not needed here.
yaml.SafeLoader.add_multi_constructor("!function", lambda loader, suffix, node: None)
wheel, folder = zipfile.ZipFile(sys.argv[1]), pathlib.Path(sys.argv[2])
written = 0


def task(path):
    return yaml.safe_load(wheel.read("lm_eval/tasks/" + path).decode("utf-8"))


def write(name, records):
    global written
    lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
    (folder / name).write_text(lines, encoding="utf-8")
    written += 1


for name in wheel.namelist():
    found = re.fullmatch(r"lm_eval/tasks/bbh/cot_fewshot/([a-z]\w*)\.yaml", name)
    if found:
        samples = task(f"bbh/cot_fewshot/{found[1]}.yaml")["fewshot_config"]["samples"]
        write(f"bbh_{found[1]}_shots.jsonl", samples)
write("gsm8k_cot_shots.jsonl", task("gsm8k/gsm8k-cot.yaml")["fewshot_config"]["samples"])
text = task("truthfulqa/truthfulqa_mc1.yaml")["doc_to_text"]
preamble = re.search(r"\{%\s*set \w+ = '(.*?)'\s*%\}", text, re.DOTALL)[1]
write("truthfulqa_preamble.jsonl", [{"text": preamble}])
print(f"{written} files in {folder}")
PY
