#!/usr/bin/env python3
"""Writes tests/fixtures/shapes: small ZAYA models of unusual shapes, computed by Hugging Face transformers on the CPU.

    python tests/python/make_shapes.py OUTDIR [CASE ...]        (needs torch, and transformers 5.13 or newer)

Every case is a directory with config.json, model.safetensors, io.safetensors (inputs, intermediates, logits, loss) and
grads.safetensors, under the key names that tests/fixtures/tiny uses. The tests only read the files; Python is not needed for them.
"""

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import ZayaConfig, ZayaForCausalLM

ROPE = {
    "hybrid": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "hybrid_sliding": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}

# what each case is for -> README.md beside the files
CASES = {
    # one key/value head: the cut between current and delayed values falls inside it
    "kv1": dict(heads=3, kv=1, head_dim=8, hidden=22, blocks=2, experts=3, width=10, router=9, vocab=41, batch=2, seq=13),
    # three key/value heads: the cut falls inside the middle one; odd widths everywhere
    "kv3_odd": dict(heads=6, kv=3, head_dim=4, hidden=37, blocks=2, experts=5, width=7, router=11, vocab=53, batch=3, seq=9),
    # two key/value heads with three query heads each; a head dimension that is no power of two
    "kv2_q6": dict(heads=6, kv=2, head_dim=12, hidden=24, blocks=2, experts=4, width=8, router=8, vocab=32, batch=1, seq=21, seed=3),
    # full, sliding (window 4), sliding, full: two RoPE bases and two rotating shares
    "sliding": dict(heads=4, kv=2, head_dim=8, hidden=24, blocks=4, experts=3, width=8, router=8, vocab=32, batch=2, seq=16,
                    layers=["hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid"], window=4, sliding_share=1.0),
    # the smallest: one block (no depth averaging), one expert beside the skip class, rotation of whole heads
    "one_block": dict(heads=2, kv=2, head_dim=4, hidden=10, blocks=1, experts=1, width=5, router=6, vocab=19, batch=2, seq=7, share=1.0),
    # two tokens: shorter than the reach of the convolutions, and a single target per row. A seed with no router so sure of itself
    # (1 - p of 1e-3) that fp32 cannot tell its gradient
    "two_tokens": dict(heads=2, kv=1, head_dim=8, hidden=16, blocks=3, experts=2, width=6, router=6, vocab=23, batch=3, seq=2, seed=11),
    # left padding, an attention mask, holes in the labels, 12 experts of which most get no token
    "padded": dict(heads=4, kv=2, head_dim=8, hidden=20, blocks=3, experts=12, width=4, router=8, vocab=31, batch=3, seq=12, padding=[0, 5, 2],
                   holes=[(0, 3), (1, 8), (2, 11)]),
}  # fmt: skip


def config_of(case):
    rope = json.loads(json.dumps(ROPE))
    rope["hybrid"]["partial_rotary_factor"] = case.get("share", 0.5)
    rope["hybrid_sliding"]["partial_rotary_factor"] = case.get("sliding_share", 0.5)
    return ZayaConfig(
        vocab_size=case["vocab"], hidden_size=case["hidden"], num_hidden_layers=case["blocks"], num_attention_heads=case["heads"],
        num_key_value_heads=case["kv"], head_dim=case["head_dim"], moe_intermediate_size=case["width"], num_experts=case["experts"],
        router_hidden_size=case["router"], max_position_embeddings=64, layer_types=case.get("layers"),
        sliding_window=case.get("window"), rope_parameters=rope, pad_token_id=0, bos_token_id=2, eos_token_id=1,
    )  # fmt: skip


def spread(name, shape):
    """(mean, standard deviation) of a parameter: nothing keeps a value that would hide a mistake, such as 0 or 1."""
    if name.endswith("balancing_biases"):
        return 0.0, 0.05
    if name.endswith("embed_tokens.weight"):
        return 0.0, 0.3
    if name.endswith("temp"):
        return 1.1, 0.3
    if name.endswith(("_scale", "norm.weight")):  # residual scales, depth averaging, RMSNorms
        return 0.9, 0.15
    if name.endswith(("_bias", ".bias")):
        return 0.0, 0.1
    gain = 2.0 if ".gate." in name else 1.0  # routers with opinions, so that several experts get tokens
    return 0.0, gain / math.sqrt(shape[-1] if "conv" not in name else shape[-2] * shape[-1])


@torch.no_grad()
def fill(model, seed):
    random = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict().items()):
        if name == "lm_head.weight":  # the embedding again
            continue
        mean, deviation = spread(name, tensor.shape)
        tensor.copy_(mean + deviation * torch.randn(tensor.shape, generator=random))
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = 0.02  # keeps the skip class in play


def record(model, store):
    """Hooks that keep the outputs of the modules below under their key names."""
    handles = []

    def keep(module, prefix, *parts):
        def hook(_module, _inputs, outputs):
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            store.update({f"{prefix}.{part}": out.detach().clone() for part, out in zip(parts, outputs) if torch.is_tensor(out)})

        handles.append(module.register_forward_hook(hook))

    body = model.model
    keep(body.embed_tokens, "embed", "out")
    handles.append(body.layers[0].register_forward_pre_hook(lambda _m, inputs: store.update({"stream.in": inputs[0].detach().clone()})))
    for i, layer in enumerate(body.layers):
        at = f"layers.{i}"
        cca = layer.self_attn.qkv_proj
        keep(layer.input_layernorm, f"{at}.input_layernorm", "out")
        keep(cca.conv_qk_depthwise, f"{at}.cca.conv0", "out")
        keep(cca.conv_qk_grouped, f"{at}.cca.conv1", "out")
        keep(cca, f"{at}.cca", "q", "k", "v")
        keep(layer.self_attn.qk_norm, f"{at}.qk_norm", "q", "k")
        keep(layer.self_attn, f"{at}.attn", "out", "weights")
        keep(layer.post_attention_residual_scale, f"{at}.stream_after_attn", "out")
        keep(layer.post_attention_layernorm, f"{at}.post_attention_layernorm", "out")
        keep(layer.mlp.gate, f"{at}.router", "logits", "prob", "index", "state")
        keep(layer.mlp, f"{at}.moe", "out")
        keep(layer, f"{at}.stream_out", "out")
    keep(body.norm, "final_norm", "out")
    return handles


def make(name, case, out):
    seed = case.get("seed", 100 + list(CASES).index(name))
    model = ZayaForCausalLM(config_of(case)).float().eval()
    fill(model, seed)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # the grouped product wants widths that are multiples of 4
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)

    random = torch.Generator().manual_seed(seed + 1000)
    ids = torch.randint(3, case["vocab"], (case["batch"], case["seq"]), generator=random)
    labels, mask = ids.clone(), None
    if "padding" in case:
        mask = torch.ones_like(ids)
        for row, left in enumerate(case["padding"]):
            mask[row, :left] = 0
        ids = ids.masked_fill(mask == 0, 0)
        labels = ids.masked_fill(mask == 0, -100)
    for row, column in case.get("holes", []):
        labels[row, column] = -100

    store = {}
    handles = record(model, store)
    out_tensors = model(input_ids=ids, labels=labels, attention_mask=mask, use_cache=False, output_router_logits=True)
    for handle in handles:
        handle.remove()
    out_tensors.loss.backward()
    store |= {"input_ids": ids, "labels": labels, "logits": out_tensors.logits.detach(), "loss": out_tensors.loss.detach().reshape(1)}
    if mask is not None:
        store["attention_mask"] = mask
    counts = []
    for i, layer in enumerate(model.model.layers):
        gate = layer.mlp.gate
        scores = torch.softmax(store[f"layers.{i}.router.logits"], -1) + gate.balancing_biases
        store[f"layers.{i}.router.choice"] = scores.argmax(-1).reshape(ids.shape)
        best, second = scores.topk(2).values.unbind(-1)
        assert float((best - second).min()) > 1e-4, f"{name}, block {i}: a tie between two classes, choose another seed"
        counts.append(torch.bincount(scores.argmax(-1), minlength=case["experts"] + 1).tolist())
    save_file({key: tensor.contiguous() for key, tensor in store.items()}, out / "io.safetensors")
    grads = {n: p.grad.contiguous() for n, p in model.named_parameters() if p.grad is not None}
    save_file(grads, out / "grads.safetensors")
    print(f"{name}: loss {float(out_tensors.loss.detach()):.6f}, tokens per class (skip last) {counts}, no gradient: "
          f"{[n for n, p in model.named_parameters() if p.grad is None]}")  # fmt: skip


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    root = Path(sys.argv[1])
    for name in sys.argv[2:] or CASES:
        out = root / name
        out.mkdir(parents=True, exist_ok=True)
        make(name, CASES[name], out)


if __name__ == "__main__":
    main()
