"""The tuned model against transformers': the same weights and tokens, loss and every gradient in f32."""

import itertools
import json
import sys

import torch


def spread(model, seed):
    """Moves every weight off its initial value, so that nothing hides behind a 0 or a 1."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if p.ndim == 1:
                p.add_(0.1 * torch.randn(p.shape, generator=random))
        for name, buffer in model.named_buffers():
            if name.endswith("balancing_biases"):
                buffer.add_(0.05 * torch.randn(buffer.shape, generator=random))
                buffer[-1] = -0.05  # the skip class in play


def main():
    import hf
    from model import TunedZaya

    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    shape = spec["shape"]
    reference = hf.build(shape, seed=5, experts="eager")
    spread(reference, seed=6)
    state = {k: v.detach() for k, v in reference.state_dict().items()}
    random = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, shape["vocab_size"], (2, 129), generator=random)
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    expected = hf.Peer(reference, compiled=False)(ids, labels)
    expected.backward()
    gradients = {n: p.grad for n, p in reference.named_parameters()}

    rows = []
    options = itertools.product(spec["compiled"], ("grouped", "loop"), ("plain", "chunked:100"), ("bmm", "conv1d"), ("native", "repeat"))
    seen = set()
    for compiled, experts, loss, conv, gqa in options:
        # every choice once each way, not every combination
        if not {("e", experts, compiled), ("l", loss, compiled), ("c", conv, compiled), ("g", gqa, compiled)} - seen:
            continue
        seen |= {("e", experts, compiled), ("l", loss, compiled), ("c", conv, compiled), ("g", gqa, compiled)}
        how = {"experts": experts, "loss": loss, "conv": conv, "gqa": gqa}
        row = {"how": how, "compiled": compiled}
        try:
            peer = TunedZaya(shape, state, how, compiled)
            got = peer(ids, labels)
            got.backward()
            errors = {n: float((p.grad - gradients[n]).norm() / gradients[n].norm().clamp_min(1e-12)) for n, p in peer.named_weights()}
            # a key temperature is one number, the sum of thousands that nearly cancel
            temperatures = max(e for n, e in errors.items() if n.endswith(".temp"))
            worst = max((n for n in errors if not n.endswith(".temp")), key=errors.get)
            row |= {"loss": abs(float(got.detach() - expected.detach())), "gradient": errors[worst], "worst": worst, "temperatures": temperatures}
            row["parameters"] = len(errors)
        except Exception as error:  # a torch that lacks a function, or a compiler that is not there
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        rows.append(row)
    with torch.no_grad():
        logits = reference(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
    biases = [layer.mlp.gate.balancing_biases for layer in reference.model.layers]
    skipped = sum(int(((x.softmax(-1) + b).argmax(-1) == len(b) - 1).sum()) for x, b in zip(logits, biases))
    print(json.dumps({"loss": float(expected.detach()), "parameters": len(gradients), "skipped_tokens": skipped, "rows": rows}))


if __name__ == "__main__":
    main()
