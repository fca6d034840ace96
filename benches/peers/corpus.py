"""Data that needs nothing but zaya: random words, tokenized into a shard that both sides read."""

import json
import random
import subprocess
import sys
from pathlib import Path

EOD = "<|endoftext|>"


def write(zaya, folder, vocab, tokens):
    """`folder`/train.bin and .idx with about `tokens` ids, spread evenly over the vocabulary. Returns the prefix."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    prefix, stamp = folder / "train", folder / "stamp"
    wanted = f"{vocab} {tokens}"
    if stamp.exists() and stamp.read_text() == wanted:
        return prefix
    words = {EOD: 0, "<unk>": 1} | {f"w{i}": i for i in range(2, vocab)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": None,
        "added_tokens": [{"id": 0, "content": EOD} | special],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    source = random.Random(1)
    (folder / "text.txt").write_text(" ".join(f"w{source.randrange(2, vocab)}" for _ in range(tokens)))
    command = [zaya, "tokenize", "--tokenizer", folder / "tokenizer.json", "--input", folder / "text.txt", "--output", prefix, "--overwrite"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"error: zaya could not tokenize the benchmark's text:\n{done.stderr.strip()}")
    stamp.write_text(wanted)
    return prefix
