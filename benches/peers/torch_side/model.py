"""ZAYA written for speed in plain PyTorch: the peer that knows its hardware.

What is tuned against a literal transcription: q, k and both value projections are one product; the two causal convolutions are a
shift and one product a head; attention is `scaled_dot_product_attention`; experts are grouped (experts.py); the loss may be chunked
(loss.py). Everything of a block but its experts is one function, `before_experts`, so that torch.compile can fuse it; the experts'
dispatch depends on the data and stays eager.

Parameters bear the names that transformers' `ZayaForCausalLM` gives them, in a flat dictionary.
"""

import torch
import torch.nn.functional as F
from experts import experts
from loss import cross_entropy

MERGE = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")
BLOCK = {
    "norm1": "input_layernorm.weight", "norm2": "post_attention_layernorm.weight",
    "q": "self_attn.qkv_proj.q_proj.weight", "k": "self_attn.qkv_proj.k_proj.weight",
    "vc": "self_attn.qkv_proj.v_proj_current.weight", "vz": "self_attn.qkv_proj.v_proj_delayed.weight",
    "w0": "self_attn.qkv_proj.conv_qk_depthwise.weight", "b0": "self_attn.qkv_proj.conv_qk_depthwise.bias",
    "w1": "self_attn.qkv_proj.conv_qk_grouped.weight", "b1": "self_attn.qkv_proj.conv_qk_grouped.bias",
    "temp": "self_attn.qk_norm.temp", "o": "self_attn.o_proj.weight",
    "wd": "mlp.gate.down_proj.weight", "bd": "mlp.gate.down_proj.bias", "norm_r": "mlp.gate.router_mlp.norm.weight",
    "fc1": "mlp.gate.router_mlp.fc1.weight", "c1": "mlp.gate.router_mlp.fc1.bias",
    "fc2": "mlp.gate.router_mlp.fc2.weight", "c2": "mlp.gate.router_mlp.fc2.bias", "fc3": "mlp.gate.router_mlp.out_proj.weight",
    "bias": "mlp.gate.balancing_biases",
}  # fmt: skip


def rms(x, weight, eps):
    # equal dtypes, or torch does not use its fused form
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def merge(branch, stream, m):
    scale, bias, stream_scale, stream_bias = m
    return (branch + bias) * scale + (stream + stream_bias) * stream_scale


def delay(x):
    """Rows one position later, a row of zeros first. x [B, S, C]."""
    return F.pad(x, (0, 0, 1, -1))


def rotate(x, cos, sin):
    """RoPE on the first channels of each head. x [B, S, H, d], cos and sin [S, 1, r/2]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attention(h, w, cos, sin, shape):
    heads, kv, d, how = shape
    batch, seq, _ = h.shape
    channels = (heads + kv) * d
    mixed = F.linear(h, torch.cat([w["q"], w["k"], w["vc"], w["vz"]]))
    qk, vc, vz = mixed.split([channels, kv * d // 2, kv * d // 2], -1)

    if how["conv"] == "conv1d":
        x = F.pad(qk.mT, (2, 0))
        y = F.conv1d(F.conv1d(x, w["w0"], w["b0"], groups=channels), w["w1"], w["b1"], groups=heads + kv).mT.view(batch, seq, -1, d)
    else:
        padded = F.pad(qk, (0, 0, 2, 0))
        u = (padded[:, :-1] * w["w0"][:, 0, 0] + padded[:, 1:] * w["w0"][:, 0, 1] + w["b0"]).view(batch, seq + 1, heads + kv, d)
        pair = torch.cat([u[:, :-1], u[:, 1:]], -1).reshape(batch * seq, heads + kv, 2 * d).transpose(0, 1)
        kernel = w["w1"].view(heads + kv, d, d, 2).permute(0, 3, 2, 1).reshape(heads + kv, 2 * d, d)
        y = torch.bmm(pair, kernel).transpose(0, 1).reshape(batch, seq, heads + kv, d) + w["b1"].view(heads + kv, d)

    q0, k0 = qk.view(batch, seq, -1, d).split([heads, kv], 2)
    mean_q = (q0.view(batch, seq, kv, -1, d) + k0.unsqueeze(3)) * 0.5
    q = y[:, :, :heads] + mean_q.view(batch, seq, heads, d)
    k = y[:, :, heads:] + mean_q.mean(3)
    # sqrt(d) x / |x| is an RMS norm without weight
    q = rotate(F.rms_norm(q, (d,), eps=1e-14), cos, sin)
    k = rotate(F.rms_norm(k, (d,), eps=1e-14) * w["temp"][:, None], cos, sin)
    v = torch.cat([vc, delay(vz)], -1).view(batch, seq, kv, d)
    q, k, v = (t.to(v.dtype).transpose(1, 2) for t in (q, k, v))
    if how["gqa"] == "repeat":
        k, v = k.repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=how["gqa"] == "native" and heads != kv)
    return F.linear(a.transpose(1, 2).reshape(batch, seq, heads * d), w["o"])


def router(h, state, w, eps):
    """Weight [T] and class [T] of every token, and the state for the next block."""
    r = F.linear(h, w["wd"], w["bd"])
    if state is not None:
        r = r + state * w["gamma"]
    t = rms(r, w["norm_r"], eps)
    t = F.gelu(F.linear(t, w["fc1"], w["c1"]))
    t = F.gelu(F.linear(t, w["fc2"], w["c2"]))
    p = F.linear(t, w["fc3"]).float().softmax(-1).flatten(0, 1)
    choice = (p.detach() + w["bias"]).argmax(-1)
    return p.gather(1, choice[:, None])[:, 0], choice, r


def before_experts(branch, x, state, into, w, cos, sin, shape, eps):
    """From the previous block's experts to this block's: merge, norm, attention, merge, norm, router."""
    x = merge(branch, x, into) if x is not None else ((branch + into[1]) * into[0]).float()
    a = attention(rms(x, w["norm1"], eps), w, cos, sin, shape)
    x = merge(a, x, w["merge1"])
    h = rms(x, w["norm2"], eps)
    p, choice, state = router(h, state, w, eps)
    return x, h.flatten(0, 1), p, choice, state


def last(branch, x, into, norm, eps):
    return rms(merge(branch, x, into), norm, eps).flatten(0, 1)


class TunedZaya(torch.nn.Module):
    """`shape` holds the fields of ZAYA's native config; `how` the choices {experts, loss, conv, gqa}. f32 weights."""

    def __init__(self, shape, state, how, compiled):
        super().__init__()
        self.shape, self.how = shape, how
        self.names, self.tensors = [], torch.nn.ParameterList()
        self.buffers_by_name = {}
        for name, tensor in state.items():
            if name.endswith("balancing_biases"):
                self.buffers_by_name[name] = tensor.clone()
            elif name != "lm_head.weight":  # the embedding again
                self.names.append(name)
                self.tensors.append(torch.nn.Parameter(tensor.clone()))
        rotary = int(shape["head_dim"] * shape["partial_rotary_factor"])
        self.frequencies = shape["rope_theta"] ** (-torch.arange(0, rotary, 2).float() / rotary)
        self.before_experts = torch.compile(before_experts) if compiled else before_experts
        self.last = torch.compile(last) if compiled else last
        chunked = how["loss"].startswith("chunked:")
        self.loss = torch.compile(cross_entropy) if compiled and not chunked else cross_entropy
        self.tables = {}

    def named_weights(self):
        return list(zip(self.names, self.tensors))

    def rope(self, seq):
        if seq not in self.tables:
            angle = torch.arange(seq).float()[:, None] * self.frequencies
            self.tables[seq] = (angle.cos()[:, None, :], angle.sin()[:, None, :])
        return self.tables[seq]

    def block(self, p, i):
        at = f"model.layers.{i}."
        w = {short: p[at + name] for short, name in BLOCK.items()}
        w["merge1"] = [p[f"{at}post_attention_residual_scale.{n}"] for n in MERGE]
        if i > 0:
            w["gamma"] = p[at + "mlp.gate.router_states_scale"]
        return w

    def forward(self, ids, labels):
        """ids and labels [B, S], labels[t] being the token after ids[t]. Mean cross-entropy."""
        s, p = self.shape, self.buffers_by_name | dict(self.named_weights())
        cos, sin = self.rope(ids.shape[1])
        heads = (s["num_attention_heads"], s["num_key_value_heads"], s["head_dim"], self.how)
        embedding = p["model.embed_tokens.weight"]
        branch, x, state = F.embedding(ids, embedding), None, None
        into = (p["model.input_hidden_states_scale"], p["model.input_hidden_states_bias"])
        for i in range(s["num_hidden_layers"]):
            x, h, weight, choice, state = self.before_experts(branch, x, state, into, self.block(p, i), cos, sin, heads, s["rms_norm_eps"])
            at = f"model.layers.{i}."
            out = experts(self.how["experts"], h, weight, choice, p[at + "mlp.experts.gate_up_proj"], p[at + "mlp.experts.down_proj"])
            branch, into = out.view(*ids.shape, -1), [p[f"{at}post_mlp_residual_scale.{n}"] for n in MERGE]
        y = self.last(branch, x, into, p["model.norm.weight"], s["rms_norm_eps"])
        return self.loss(self.how["loss"], y, embedding, labels.flatten())
