#!/usr/bin/env python3
"""zaya's shards read by Megatron-Core's own IndexedDataset, and Megatron-Core's read by zaya.

  scripts/check-megatron.sh [ZAYA]        makes a virtual environment and runs this

Megatron-Core imports PyTorch for a base class alone; where PyTorch is not installed, a stand-in with that class is enough.
"""

import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import types
from importlib.metadata import version
from pathlib import Path

ZAYA = str(Path(sys.argv[1]).resolve())


def indexed_dataset():
    """The module megatron.core.datasets.indexed_dataset, without what else its package imports."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        torch = types.ModuleType("torch")
        torch.utils, torch.utils.data = types.ModuleType("torch.utils"), types.ModuleType("torch.utils.data")
        torch.utils.data.Dataset, torch.Tensor = type("Dataset", (), {}), object
        sys.modules.update({"torch": torch, "torch.utils": torch.utils, "torch.utils.data": torch.utils.data})
    megatron = Path(list(importlib.util.find_spec("megatron").submodule_search_locations)[0])
    for name in ("megatron", "megatron.core", "megatron.core.datasets"):
        package = types.ModuleType(name)
        package.__path__ = [str(megatron.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    utils = types.ModuleType("megatron.core.utils")
    utils.log_single_rank = lambda *a, **k: None
    sys.modules["megatron.core.utils"] = utils
    from megatron.core.datasets import indexed_dataset

    return indexed_dataset


def zaya(*args, ok=True):
    done = subprocess.run([ZAYA, "tokenize", *map(str, args)], capture_output=True, text=True)
    if ok and done.returncode:
        sys.exit(f"zaya tokenize {' '.join(map(str, args))} failed:\n{done.stderr}")
    return done.stdout


def documents(seed, count):
    words = "the cat and dog run over quick brown foxes \u4e2d\u6587 caf\u00e9 \U0001f600".split()
    r = random.Random(seed)
    return [" ".join(r.choices(words, k=r.randrange(1, 200))) for _ in range(count)]


def lines(path, texts):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def check(label, same):
    print(f"{'ok  ' if same else 'FAIL'} {label}")
    return bool(same)


def main():
    m = indexed_dataset()
    import numpy

    good = True
    with tempfile.TemporaryDirectory() as folder:
        d = Path(folder)
        a, b = lines(d / "a.jsonl", documents(1, 300)), lines(d / "b.jsonl", documents(2, 200))
        zaya("--train-vocab", 300, "--input", a, b, "--output", d / "small.json")
        wide = json.loads((d / "small.json").read_text())
        first = len(wide["model"]["vocab"])
        extra = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
        wide["added_tokens"] += [dict(id=first + i, content=f"<added {i}>", **extra) for i in range(65_600 - first)]
        (d / "wide.json").write_text(json.dumps(wide))
        for name, dtype in (("small", numpy.uint16), ("wide", numpy.int32)):
            of = {}
            for part, inputs in (("a", [a]), ("b", [b]), ("ab", [a, b])):
                of[part] = d / f"{name}-{part}"
                zaya("--tokenizer", d / f"{name}.json", "--input", *inputs, "--output", of[part])
            data = m.IndexedDataset(str(of["ab"]))
            cat = [json.loads(l)["ids"] for l in zaya("cat", of["ab"], "--doc", "..").splitlines()]
            good &= check(f"{name}: {dtype.__name__}, {len(data)} documents", data.index.dtype == dtype and len(data) == len(cat) == 500)
            good &= check(f"{name}: every document's ids", all(list(map(int, data[i])) == cat[i] for i in range(len(data))))
            good &= check(f"{name}: document borders", list(data.document_indices) == list(range(len(data) + 1)))
            good &= check(f"{name}: parts of documents by offset", all(list(map(int, data.get(i, offset=1, length=1))) == cat[i][1:2] for i in range(0, 500, 7)))

            builder = m.IndexedDatasetBuilder(str(d / f"{name}-theirs.bin"), dtype=dtype)
            for ids in cat:
                builder.add_document(numpy.array(ids), [len(ids)])
            builder.finalize(str(d / f"{name}-theirs.idx"))
            same = lambda x, y: (d / x).read_bytes() == (d / y).read_bytes()
            good &= check(f"{name}: the files that its builder writes, byte for byte", all(same(f"{name}-theirs.{e}", f"{name}-ab.{e}") for e in ("bin", "idx")))
            stats = json.loads(zaya("stats", d / f"{name}-theirs", "--json"))
            good &= check(f"{name}: zaya reads its files", (stats["documents"], stats["tokens"]) == (500, sum(map(len, cat))))

            merged = m.IndexedDatasetBuilder(str(d / f"{name}-merged.bin"), dtype=dtype)
            merged.add_index(str(of["a"]))
            merged.add_index(str(of["b"]))
            merged.finalize(str(d / f"{name}-merged.idx"))
            zaya("merge", d / f"{name}-ours", of["a"], of["b"])
            good &= check(f"{name}: its merge and zaya's, byte for byte", all(same(f"{name}-merged.{e}", f"{name}-ours.{e}") for e in ("bin", "idx")))
            good &= check(f"{name}: merged is tokenized at once", all(same(f"{name}-ours.{e}", f"{name}-ab.{e}") for e in ("bin", "idx", "json")))
    print(f"Megatron-Core {version('megatron-core')}: {'all good' if good else 'DIFFERENCES'}")
    return 0 if good else 1


sys.exit(main())
