"""The routed experts of one block, two ways. Both sort the tokens by expert, so that every expert sees one dense matrix.

Shapes: h [T, D], weight p [T], choice [T] (class E = skip, whose output is 0), gate_up [E, 2F, D], down [E, D, F] -> [T, D].
"""

import torch
import torch.nn.functional as F


def sort_by_expert(choice, experts):
    """Tokens in the order of their experts, those of the skip class left out; and where each expert's tokens end."""
    ends = torch.bincount(choice, minlength=experts + 1)[:experts].cumsum(0)
    return choice.argsort(stable=True)[: int(ends[-1])], ends


def grouped(h, p, choice, gate_up, down):
    """torch's own grouped product."""
    order, ends = sort_by_expert(choice, gate_up.shape[0])
    ends = ends.to(torch.int32)
    gate, up = F.grouped_mm(h[order], gate_up.mT, offs=ends).chunk(2, -1)
    out = F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
    return torch.zeros(h.shape, dtype=out.dtype).index_copy(0, order, out * p[order].to(out.dtype)[:, None])


class Loop(torch.autograd.Function):
    """One product an expert, written straight into place, with a backward by hand: no slices or sums of gradients between."""

    @staticmethod
    def forward(ctx, h, p, choice, gate_up, down):
        order, ends = sort_by_expert(choice, gate_up.shape[0])
        ends = ends.tolist()
        x, weight = h[order], p[order].to(h.dtype)[:, None]
        both = x.new_empty(x.shape[0], gate_up.shape[1])
        for e, a, b in spans(ends):
            torch.mm(x[a:b], gate_up[e].t(), out=both[a:b])
        gate, up = both.chunk(2, -1)
        inner = F.silu(gate) * up
        y = torch.empty_like(x)
        for e, a, b in spans(ends):
            torch.mm(inner[a:b], down[e].t(), out=y[a:b])
        ctx.save_for_backward(order, x, weight, both, inner, y, gate_up, down)
        ctx.ends, ctx.tokens, ctx.p_dtype = ends, h.shape[0], p.dtype
        return torch.zeros_like(h).index_copy_(0, order, y * weight)

    @staticmethod
    def backward(ctx, grad):
        order, x, weight, both, inner, y, gate_up, down = ctx.saved_tensors
        g = grad[order].to(x.dtype)
        dp = torch.zeros(ctx.tokens, dtype=ctx.p_dtype).index_copy_(0, order, (g * y).sum(-1).to(ctx.p_dtype))
        dy = g * weight
        d_down, d_gate_up = torch.zeros_like(down), torch.zeros_like(gate_up)
        d_inner = torch.empty_like(inner)
        for e, a, b in spans(ctx.ends):
            torch.mm(dy[a:b], down[e], out=d_inner[a:b])
            torch.mm(dy[a:b].t(), inner[a:b], out=d_down[e])
        gate, up = both.chunk(2, -1)
        d_both = torch.empty_like(both)
        d_gate, d_up = d_both.chunk(2, -1)
        torch.mul(d_inner, F.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(d_inner.mul_(up), gate, grad_input=d_gate)
        dx = torch.empty_like(x)
        for e, a, b in spans(ctx.ends):
            torch.mm(d_both[a:b], gate_up[e], out=dx[a:b])
            torch.mm(d_both[a:b].t(), x[a:b], out=d_gate_up[e])
        dh = x.new_zeros(ctx.tokens, x.shape[1]).index_copy_(0, order, dx)
        return dh, dp, None, d_gate_up, d_down


def spans(ends):
    """(expert, first row, row after the last) of every expert that has tokens."""
    return [(e, a, b) for e, (a, b) in enumerate(zip([0, *ends], ends)) if b > a]


def experts(how, h, p, choice, gate_up, down):
    """How: "grouped" or "loop". Autocast does not know either, so its dtype is put on by hand."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        h, gate_up, down = h.to(dtype), gate_up.to(dtype), down.to(dtype)
    with torch.autocast("cpu", enabled=False):
        return grouped(h, p, choice, gate_up, down) if how == "grouped" else Loop.apply(h, p, choice, gate_up, down)
