//! Names of the tensors that a traced forward pass gives, in files that are compared with another framework's.
//!
//! Shapes: B sequences of S tokens, D channels, E experts, V entries of the vocabulary, C = q_dim + kv_dim.

pub const INPUT_IDS: &str = "input_ids"; // [B, S] i64
pub const LABELS: &str = "labels"; // [B, S] i64, -100 where nothing is predicted
pub const ATTENTION_MASK: &str = "attention_mask"; // [B, S] i64, 0 for padding
pub const EMBED_OUT: &str = "embed.out"; // [B, S, D]
pub const STREAM_IN: &str = "stream.in"; // [B, S, D]
pub const FINAL_NORM_OUT: &str = "final_norm.out"; // [B, S, D]
pub const LOGITS: &str = "logits"; // [B, S, V]
pub const LOSS: &str = "loss"; // [1]

/// Names within a block, after `layers.<block>.`.
pub const IN_BLOCK: [&str; 19] = [
    "input_layernorm.out",          // [B, S, D]
    "cca.conv0.out",                // [B, C, S + 1], from the position before the first on
    "cca.conv1.out",                // [B, C, S]
    "cca.q",                        // [B, S, query heads, head dim], before the q/k norm
    "cca.k",                        // [B, S, kv heads, head dim]
    "cca.v",                        // [B, S, kv heads, head dim]
    "qk_norm.q",                    // [B, S, query heads, head dim], before RoPE
    "qk_norm.k",                    // [B, S, kv heads, head dim]
    "attn.weights",                 // [B, query heads, S, S]
    "attn.out",                     // [B, S, D], after the output projection
    "stream_after_attn.out",        // [B, S, D]
    "post_attention_layernorm.out", // [B, S, D]
    "router.logits",                // [B * S, E + 1]
    "router.prob",                  // [B * S, 1], 0 where the skip class was chosen
    "router.index",                 // [B * S, 1] i64, 0 where the skip class was chosen
    "router.choice",                // [B, S] i64, the class that was chosen
    "router.state",                 // [B, S, router width], what the next block's router receives
    "moe.out",                      // [B, S, D]
    "stream_out.out",               // [B, S, D]
];

/// The full name of a tensor of one block.
pub fn in_block(block: usize, name: &str) -> String {
    format!("layers.{block}.{name}")
}
