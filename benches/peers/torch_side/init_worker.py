"""Writes the weights that both sides start from, in Hugging Face format, and says how the tokens fall on the experts.

At the usual initial weights a router sends most tokens to a few experts, which is neither what training is like nor the same work
from one seed to the next. So the routers' matrices get weights of ordinary size, and the balancing biases are set, block by block, so
that the experts share the tokens about evenly, as a balanced run has them.
"""

import json
import sys

import hf
import routing
import torch


def main():
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    model = hf.build(spec["shape"], spec["seed"])
    random = torch.Generator().manual_seed(spec["seed"])
    routing.widen(model, random)
    ids = torch.randint(2, spec["shape"]["vocab_size"], (4, spec["seq_len"]), generator=random)
    routing.balance(model, ids, spec["shape"]["num_experts"])
    model.save_pretrained(spec["out"])
    shares = [float(c.bincount().max() / len(c)) for c in routing.choices(model, ids)]
    print(json.dumps({"busiest_expert_share": shares}))


if __name__ == "__main__":
    main()
