"""Routers that send the tokens to many experts, as those of a trained model do."""

import torch


@torch.no_grad()
def widen(model, random):
    """Gives the routers' matrices weights of ordinary size in place of the initial 0.02."""
    for name, p in sorted(model.named_parameters()):
        if ".gate." in name and p.ndim == 2:
            p.copy_(2 * torch.randn(p.shape, generator=random) / p.shape[1] ** 0.5)


@torch.no_grad()
def balance(model, ids, classes):
    """Sets the balancing biases, block by block, so that the first `classes` classes share the tokens about evenly."""
    for i, layer in enumerate(model.model.layers):
        layer.mlp.gate.balancing_biases[:classes] = even_biases(probabilities(model, ids)[i][:, :classes])


@torch.no_grad()
def choices(model, ids):
    """The class of every token, [T] for each block."""
    layers = model.model.layers
    return [(p + layer.mlp.gate.balancing_biases).argmax(-1) for p, layer in zip(probabilities(model, ids), layers)]


def probabilities(model, ids):
    """[T, E + 1] for each block."""
    return [x.softmax(-1) for x in model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits]


def even_biases(p):
    """Biases of mean 0 under which every class wins about as often."""
    bias = torch.zeros(p.shape[1])
    for i in range(2000):
        load = torch.bincount((p + bias).argmax(-1), minlength=len(bias)) / len(p)
        bias -= 0.3 * 0.997**i * (load - 1 / len(bias))
    return bias - bias.mean()
