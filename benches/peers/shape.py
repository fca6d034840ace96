"""The model of recipes/bench-cpu.toml (preset `bench-15m`), as the fields of ZAYA's native config."""

BENCH_15M = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts": 16,
    "moe_intermediate_size": 256,
    "router_hidden_size": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
