//! The shape of a ZAYA model: every number that decides which parameters exist and what they mean.
//!
//! Files of other people (three Hugging Face schemas) are read into this struct by `crate::hf`; recipes by `crate::recipe`.

use serde::{Deserialize, Serialize};

pub use crate::tensor::backend::SkipMode;

/// How far back the attention of one block looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionKind {
    /// Every earlier token of the sequence (or document).
    Full,
    /// The last `sliding_window` tokens, the current one included.
    Sliding,
}

/// Rotary position embedding of one attention kind.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    pub theta: f64,
    /// Share of a head's channels that rotate (the first ones).
    pub partial_rotary_factor: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    pub vocab_size: usize,
    /// D, width of the residual stream.
    pub hidden_size: usize,
    /// Query heads that are computed (after CCA's query compression).
    pub num_query_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub num_experts: usize,
    /// F, width of an expert's SwiGLU.
    pub expert_width: usize,
    pub router_width: usize,
    /// One entry per decoder block.
    pub attention: Vec<AttentionKind>,
    /// Tokens a sliding block sees, the current one included.
    pub sliding_window: Option<usize>,
    pub rope: Rope,
    pub rope_sliding: Rope,
    pub max_position_embeddings: usize,
    pub norm_eps: f64,
    /// The router's own norm; 1e-6 in Zyphra's November 2025 code, `norm_eps` elsewhere.
    pub router_norm_eps: f64,
    pub skip_mode: SkipMode,
    pub initializer_range: f64,
    /// Embedding row that is zero at the start and gets no gradient from look-ups.
    pub pad_token_id: Option<u32>,
    pub bos_token_id: Option<u32>,
    pub eos_token_id: Option<u32>,
}

impl ModelConfig {
    pub fn num_blocks(&self) -> usize {
        self.attention.len()
    }
    /// Channels of all query heads.
    pub fn q_dim(&self) -> usize {
        self.num_query_heads * self.head_dim
    }
    /// Channels of all key heads, and of all value heads.
    pub fn kv_dim(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }
    /// Channels of CCA's convolutions: queries first, then keys.
    pub fn conv_dim(&self) -> usize {
        self.q_dim() + self.kv_dim()
    }
    /// Router classes: every expert, then the skip class.
    pub fn num_classes(&self) -> usize {
        self.num_experts + 1
    }
    pub fn rope_of(&self, kind: AttentionKind) -> Rope {
        match kind {
            AttentionKind::Full => self.rope,
            AttentionKind::Sliding => self.rope_sliding,
        }
    }
    /// Rotating channels of a head: floor(head_dim * factor), as Hugging Face counts them.
    pub fn rotary_dim(&self, kind: AttentionKind) -> usize {
        (self.head_dim as f64 * self.rope_of(kind).partial_rotary_factor) as usize
    }

    /// What makes this shape impossible: `(field, sentence)` pairs, empty when it is a model.
    /// Fields are named as above; the caller knows which key of which file they came from.
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let mut out = Vec::new();
        let mut positive = |field: &'static str, value: usize| {
            if value == 0 {
                out.push((field, format!("{field} must be at least 1, got 0")));
            }
        };
        positive("vocab_size", self.vocab_size);
        positive("hidden_size", self.hidden_size);
        positive("num_query_heads", self.num_query_heads);
        positive("num_kv_heads", self.num_kv_heads);
        positive("head_dim", self.head_dim);
        positive("num_experts", self.num_experts);
        positive("expert_width", self.expert_width);
        positive("router_width", self.router_width);
        positive("num_blocks", self.num_blocks());
        positive("max_position_embeddings", self.max_position_embeddings);
        if !out.is_empty() {
            return out;
        }
        if !self.num_query_heads.is_multiple_of(self.num_kv_heads) {
            out.push((
                "num_query_heads",
                format!(
                    "num_query_heads ({}) must be a multiple of num_kv_heads ({}): each key/value head serves a whole group of query heads",
                    self.num_query_heads, self.num_kv_heads
                ),
            ));
        }
        if !self.kv_dim().is_multiple_of(2) {
            out.push((
                "head_dim",
                format!(
                    "num_kv_heads * head_dim ({}) must be even: half of the value channels come from the current token, half from the one before",
                    self.kv_dim()
                ),
            ));
        }
        for kind in [AttentionKind::Full, AttentionKind::Sliding] {
            if !self.attention.contains(&kind) {
                continue;
            }
            let rope = self.rope_of(kind);
            if !(0.0..=1.0).contains(&rope.partial_rotary_factor) {
                out.push((
                    "partial_rotary_factor",
                    format!("partial_rotary_factor must lie in 0..=1, got {}", rope.partial_rotary_factor),
                ));
            } else if !self.rotary_dim(kind).is_multiple_of(2) {
                out.push((
                    "head_dim",
                    format!(
                        "RoPE rotates channels in pairs, but head_dim {} * partial_rotary_factor {} gives {} rotating channels, an odd number",
                        self.head_dim,
                        rope.partial_rotary_factor,
                        self.rotary_dim(kind)
                    ),
                ));
            }
            if !(rope.theta.is_finite() && rope.theta > 0.0) {
                out.push(("rope_theta", format!("rope_theta must be a positive number, got {}", rope.theta)));
            }
        }
        if self.attention.contains(&AttentionKind::Sliding) && self.sliding_window.is_none_or(|w| w == 0) {
            out.push(("sliding_window", "sliding_window must be at least 1 when a block uses sliding attention".to_string()));
        }
        for (field, eps) in [("norm_eps", self.norm_eps), ("router_norm_eps", self.router_norm_eps)] {
            if !(eps.is_finite() && eps > 0.0) {
                out.push((field, format!("{field} must be a positive number, got {eps}")));
            }
        }
        for (field, id) in
            [("pad_token_id", self.pad_token_id), ("bos_token_id", self.bos_token_id), ("eos_token_id", self.eos_token_id)]
        {
            if let Some(id) = id
                && id as usize >= self.vocab_size
            {
                out.push((field, format!("{field} is {id}, but vocab_size is {}", self.vocab_size)));
            }
        }
        out
    }
}
