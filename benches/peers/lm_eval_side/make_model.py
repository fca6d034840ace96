"""A random ZAYA model of about 20 M parameters as a Hugging Face directory: make_model.py TOKENIZER.json OUT."""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import ZayaConfig, ZayaForCausalLM

SHAPE = {
    "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 11, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 256, "router_hidden_size": 64, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.02,
}  # fmt: skip


def main():
    tokenizer, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(1)
    model = ZayaForCausalLM(ZayaConfig(**SHAPE)).float().eval()
    model.save_pretrained(out)
    shutil.copyfile(tokenizer, out / "tokenizer.json")
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "model_max_length": 2048}
    (out / "tokenizer_config.json").write_text(json.dumps(special | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=1))
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters())}))


main()
