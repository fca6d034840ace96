"""The tuned model against transformers': the same weights and tokens, loss and every gradient in f32."""

import itertools
import json
import sys

import hf
import routing
import torch
from model import TunedZaya


@torch.no_grad()
def spread(model, seed):
    """Moves every weight off its initial value, so that nothing hides behind a 0 or a 1, and makes tokens differ."""
    random = torch.Generator().manual_seed(seed)
    for _, p in sorted(model.named_parameters()):
        if p.ndim == 1:
            p.add_(0.1 * torch.randn(p.shape, generator=random))
    weight = model.model.embed_tokens.weight
    weight.copy_(0.3 * torch.randn(weight.shape, generator=random))
    routing.widen(model, random)


def main():
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(spec["threads"])
    shape = spec["shape"]
    reference = hf.build(shape, seed=5, experts="eager")
    spread(reference, seed=6)
    random = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, shape["vocab_size"], (2, 129), generator=random)
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    routing.balance(reference, ids, shape["num_experts"] + 1)  # the skip class in play
    state = {k: v.detach() for k, v in reference.state_dict().items()}
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
    choices = routing.choices(reference, ids)
    skipped, used = sum(int((c == shape["num_experts"]).sum()) for c in choices), [len(c.unique()) for c in choices]
    print(json.dumps({"loss": float(expected.detach()), "parameters": len(gradients), "skipped_tokens": skipped, "classes_used": used, "rows": rows}))


if __name__ == "__main__":
    main()
