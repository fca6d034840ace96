"""Head and loss: mean cross-entropy of y @ embedding^T, plain or in chunks of tokens.

Shapes: y [T, D], embedding [V, D], labels [T] -> scalar.
"""

import torch
import torch.nn.functional as F


def plain(y, embedding, labels, widen):
    logits = F.linear(y, embedding)
    return F.cross_entropy(logits.float() if widen else logits, labels)


class Chunked(torch.autograd.Function):
    """Never holds more than `rows` rows of logits. The gradient is made in the forward pass, while they are there."""

    @staticmethod
    def forward(ctx, y, embedding, labels, rows):
        tokens = y.shape[0]
        dy, d_embedding, total = torch.empty_like(y), torch.zeros(embedding.shape), torch.zeros(())
        minus_one = torch.full((rows, 1), -1.0)
        for a in range(0, tokens, rows):
            part, label = y[a : a + rows], labels[a : a + rows, None]
            p = torch.mm(part, embedding.t()).float().softmax(-1)
            total -= p.gather(1, label).clamp_min_(1e-38).log_().sum()
            p.scatter_add_(1, label, minus_one[: len(part)])
            d_logits = p.to(y.dtype)
            torch.mm(d_logits, embedding, out=dy[a : a + rows])
            if y.dtype == torch.float32:
                d_embedding.addmm_(d_logits.t(), part)
            else:
                d_embedding += torch.mm(d_logits.t(), part)
        ctx.save_for_backward(dy, d_embedding)
        ctx.tokens = tokens
        return total / tokens

    @staticmethod
    def backward(ctx, grad):
        dy, d_embedding = ctx.saved_tensors
        return dy.mul_(grad / ctx.tokens), d_embedding.mul_(grad / ctx.tokens), None, None


def cross_entropy(how, y, embedding, labels):
    """How: "plain" (logits as they come), "widened" (logits in f32), or "chunked:ROWS"."""
    if not how.startswith("chunked:"):
        return plain(y, embedding, labels, how == "widened")
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        y, embedding = y.to(dtype), embedding.to(dtype)
    with torch.autocast("cpu", enabled=False):
        return Chunked.apply(y, embedding, labels, int(how.split(":")[1]))
