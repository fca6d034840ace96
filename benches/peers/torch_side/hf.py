"""transformers' own ZAYA with the shapes of the recipe's model."""

import torch
from transformers import ZayaConfig, ZayaForCausalLM


def config(shape):
    rope = {"rope_type": "default", "rope_theta": shape["rope_theta"], "partial_rotary_factor": shape["partial_rotary_factor"]}
    fields = {k: v for k, v in shape.items() if k not in ("rope_theta", "partial_rotary_factor")}
    return ZayaConfig(
        **fields, rope_parameters={"hybrid": rope, "hybrid_sliding": dict(rope)}, use_cache=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=0, initializer_range=0.02,
    )  # fmt: skip


def build(shape, seed, experts="grouped_mm"):
    """f32 weights, drawn at random; key temperatures are 1, since transformers leaves them at 0 (all attention even)."""
    torch.manual_seed(seed)
    model = ZayaForCausalLM(config(shape)).float().train()
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation(experts)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.qk_norm.temp.fill_(1.0)
    return model


class Peer(torch.nn.Module):
    """The interface of TunedZaya around it."""

    def __init__(self, model, compiled):
        super().__init__()
        self.model = model
        self.call = torch.compile(model) if compiled else model

    def named_weights(self):
        return list(self.model.named_parameters())

    def forward(self, ids, labels):
        # `shift_labels` are labels that need no further shift
        return self.call(input_ids=ids, labels=labels, shift_labels=labels, use_cache=False).loss
