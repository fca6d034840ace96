"""Writes the weights that both sides start from, in Hugging Face format, and says how the tokens fall on the experts.

At the usual initial weights a router sends most tokens to a few experts, which is neither what training is like nor the same work
from one seed to the next. So the routers' matrices get weights of ordinary size, and the balancing biases are set, block by block, so
that the experts share the tokens about evenly, as a balanced run has them.
"""

import json
import sys

import hf
import torch


def main():
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    model = hf.build(spec["shape"], spec["seed"])
    random = torch.Generator().manual_seed(spec["seed"])
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if ".gate." in name and p.ndim == 2:
                p.copy_(2 * torch.randn(p.shape, generator=random) / p.shape[1] ** 0.5)
        ids = torch.randint(2, spec["shape"]["vocab_size"], (4, spec["seq_len"]), generator=random)
        for i, layer in enumerate(model.model.layers):
            layer.mlp.gate.balancing_biases[:-1] = even_biases(probabilities(model, ids, i))
        model.save_pretrained(spec["out"])
        shares = []
        for i, layer in enumerate(model.model.layers):
            choice = (probabilities(model, ids, i) + layer.mlp.gate.balancing_biases[:-1]).argmax(-1)
            shares.append(float(choice.bincount().max() / len(choice)))
    print(json.dumps({"busiest_expert_share": shares}))


def probabilities(model, ids, block):
    """Of the real experts in one block, [T, E]."""
    return model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits[block].softmax(-1)[:, :-1]


def even_biases(p):
    """Biases of mean 0 under which every class wins about as often."""
    bias = torch.zeros(p.shape[1])
    for i in range(2000):
        load = torch.bincount((p + bias).argmax(-1), minlength=len(bias)) / len(p)
        bias -= 0.3 * 0.997**i * (load - 1 / len(bias))
    return bias - bias.mean()


if __name__ == "__main__":
    main()
