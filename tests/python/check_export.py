#!/usr/bin/env python3
"""Checks that Hugging Face transformers loads exported ZAYA models, and computes what it should.

    python3 tests/python/check_export.py DIR ...

For every DIR: `ZayaForCausalLM.from_pretrained` finds every tensor and no other, in its shape. If DIR holds an io.safetensors
(`input_ids`, `logits`, perhaps `attention_mask`), the logits must be equal to it: to 1e-5 in fp32, to 1e-3 in bf16, as a relative
error over the whole tensor. Otherwise the logits of a few tokens must be finite. Without transformers 5.13 or newer it says so
and succeeds. Exit status: 0 good or skipped, 1 bad.
"""

import sys
from pathlib import Path


def check(directory, torch, load_file, ZayaForCausalLM):
    """The problems of one directory."""
    model, info = ZayaForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True, attn_implementation="eager")
    problems = [f"{what}: {sorted(keys)}" for what, keys in info.items() if keys]
    # The bf16 fixtures were computed by a model converted as a whole, which also rounds RoPE's frequencies.
    model.to(model.dtype).eval()
    # `from_pretrained` of transformers (seen in 5.23) sets the skip class's bias to -1, whatever the file says.
    stored = {k: t for f in directory.glob("*.safetensors") for k, t in load_file(f).items() if k.endswith("balancing_biases")}
    reset = [name for name, buffer in model.named_buffers() if name in stored and not torch.equal(buffer.float(), stored[name].float())]
    if reset:
        print(f"note: {directory}: transformers changed {len(reset)} tensors {reset[0]}, ... on loading; put back from the file")
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.data = stored[name].float()
    io = directory / "io.safetensors"
    expected = load_file(io) if io.exists() else {"input_ids": torch.arange(2, 9)[None] % model.config.vocab_size}

    def forward():
        with torch.no_grad():
            return model(input_ids=expected["input_ids"], attention_mask=expected.get("attention_mask"), use_cache=False).logits.double()

    try:
        logits = forward()
    except RuntimeError:  # the grouped matrix product of torch wants widths that are multiples of 16 bytes
        model.set_experts_implementation("eager")
        logits = forward()
    if "logits" not in expected:
        result = "logits are finite"
        if not bool(logits.isfinite().all()):
            problems.append("logits are not finite")
    else:
        error = float((logits - expected["logits"].double()).norm() / expected["logits"].double().norm())
        result = f"relative error of the logits {error:.1e}"
        if not error <= (1e-5 if model.dtype == torch.float32 else 1e-3):
            problems.append(result)
    print(f"{'FAILED' if problems else 'ok'}: {directory} ({model.dtype}): {result}")
    for problem in problems:
        print(f"  {problem}")
    return problems


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        import torch
        import transformers
        from safetensors.torch import load_file
        from transformers import ZayaForCausalLM
    except Exception as error:  # a torch without its libraries raises more than ImportError
        print(f"skipped: transformers with ZAYA (5.13 or newer) cannot be imported: {type(error).__name__}: {error}")
        return
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    bad = [directory for directory in map(Path, sys.argv[1:]) if check(directory, torch, load_file, ZayaForCausalLM)]
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
