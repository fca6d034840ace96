"""Learns a byte-level BPE of SIZE entries from a text with a trainer of PyPI: `trainers.py PEER SIZE TEXT OUTPUT`.

OUTPUT gets the merges as a JSON list of pairs. The caller measures this process.
"""

import json
import sys


def gigabpe(size, path):
    import gigabpe

    special = ["<|endoftext|>"]
    return gigabpe.train_bpe([path], vocab_size=size, pretokenizer="bytelevel", special_tokens=special, threads=1)[1]


def tokenizers(size, path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=size, **options)
    tokenizer.train_from_iterator([open(path, newline="").read()], trainer)
    return json.loads(tokenizer.to_str())["model"]["merges"]


def main():
    peer, size, path, output = sys.argv[1:]
    merges = {"gigabpe": gigabpe, "tokenizers": tokenizers}[peer](int(size), path)
    json.dump([list(merge) for merge in merges], open(output, "w"))


main()
