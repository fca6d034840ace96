"""The optimizer step of both peers: global-norm clipping, Muon for the matrices, AdamW for the rest, as zaya's recipe has them.

Muon is batched: matrices of one shape go through Newton-Schulz together, as [N, m, n].
"""

import math
import time
from collections import defaultdict

import torch

A, B, C = 3.4445, -4.7750, 2.0315
MOMENTUM, DECAY, STEPS, CLIP = 0.95, 0.1, 5, 1.0


def is_matrix(name, tensor):
    """2-D weights but the embedding, and every expert's own matrices (stored together, [E, m, n])."""
    return name.endswith(("experts.gate_up_proj", "experts.down_proj")) or (tensor.ndim == 2 and "embed_tokens" not in name)


def newton_schulz(u, dtype):
    """Brings the singular values of every u[i] towards 1. u [N, m, n] f32 -> the same shape in `dtype`."""
    x = (u / u.norm(dim=(1, 2), keepdim=True).clamp_min(1e-30)).to(dtype)
    tall = x.shape[1] > x.shape[2]
    x = x.mT.contiguous() if tall else x
    for _ in range(STEPS):
        a = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x


class MuonAdamW:
    def __init__(self, named, lr, dtype):
        """`dtype`: that of the Newton-Schulz products."""
        self.lr, self.dtype = lr, dtype
        self.all = [p for _, p in named]
        shapes = defaultdict(list)
        rest = []
        for name, p in named:
            if is_matrix(name, p):
                shapes[tuple(p.shape[-2:])].append(p)
            else:
                rest.append(p)
        self.groups = [(ps, torch.zeros(sum(p.numel() for p in ps) // (m * n), m, n)) for (m, n), ps in shapes.items()]
        self.adamw = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def least_seconds(self):
        """A floor of a step's time, from Newton-Schulz of one matrix of each shape: tells a hopeless dtype without a whole step."""
        total = 0.0
        for _, momentum in self.groups:
            sample = torch.randn(1, *momentum.shape[1:])
            begun = time.perf_counter()
            newton_schulz(sample, self.dtype)
            total += (time.perf_counter() - begun) * len(momentum) / torch.get_num_threads()
        return total

    @torch.no_grad()
    def step(self):
        torch.nn.utils.clip_grad_norm_(self.all, CLIP, foreach=True)
        for params, momentum in self.groups:
            m, n = momentum.shape[1:]
            grad = torch.cat([p.grad.view(-1, m, n) for p in params])
            momentum.lerp_(grad, 1 - MOMENTUM)
            update = newton_schulz(grad.lerp_(momentum, MOMENTUM), self.dtype)
            rate, first = -self.lr * 0.2 * math.sqrt(max(m, n)), 0
            for p in params:
                count = p.numel() // (m * n)
                p.mul_(1 - self.lr * DECAY).add_(update[first : first + count].view(p.shape), alpha=rate)
                first += count
        self.adamw.step()
        for p in self.all:
            p.grad = None
