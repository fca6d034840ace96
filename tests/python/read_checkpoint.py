"""Reads a zaya checkpoint with nothing but safetensors and numpy: python3 read_checkpoint.py CHECKPOINT_DIR"""
import hashlib, json, os, sys
import numpy as np
from safetensors import safe_open


def open_checkpoint(folder):
    """The manifest as a dict, and a function that gives a tensor by its logical name."""
    manifest = json.load(open(os.path.join(folder, "manifest.json"), encoding="utf-8"))
    assert manifest["format"] == "zck" and manifest["version"] == 1 and manifest["complete"]
    entries = {entry["name"]: entry for entry in manifest["entries"]}

    def read(name):
        entry, blocks = entries[name], []
        rows = entry["shape"][0] if entry["shape"] else 1
        for part in entry["parts"]:  # in row order
            a, b = part["rows"]
            key = name if (a, b) == (0, rows) else f"{name}#rows={a}:{b}"
            with safe_open(os.path.join(folder, part["file"]), framework="numpy") as file:
                blocks.append(file.get_tensor(key))
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    return manifest, read


if __name__ == "__main__":
    manifest, read = open_checkpoint(sys.argv[1])
    print("step", manifest["step"])
    for entry in manifest["entries"]:
        tensor = read(entry["name"])
        assert list(tensor.shape) == entry["shape"]
        print(entry["name"], hashlib.sha256(tensor.tobytes()).hexdigest())
