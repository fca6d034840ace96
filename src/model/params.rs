//! The one table of parameters. Initialisation, optimizers, checkpoints, Hugging Face import and export, the planner
//! and per-parameter metrics all walk it; no other list of names exists.
//!
//! One entry is one matrix as Muon sees it: each expert's `gate_up` and `down` stand apart, q, k and v stand apart.

use super::config::ModelConfig;

/// Place of a parameter in the table, and of its buffer in every store built from it.
pub type ParamId = usize;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptimKind {
    /// Newton-Schulz orthogonalised momentum: every weight matrix but the embedding.
    Muon,
    /// Embedding, convolutions, norms, scales, biases, temperatures.
    AdamW,
    /// A router's balancing biases: moved by the expert load, never by the loss. Not counted as parameters.
    Balance,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// N(0, initializer_range^2).
    Normal,
    /// As `Normal`, with the row of the padding token zeroed.
    Embedding,
    Const(f32),
    /// 0 for every expert, -1 for the skip class (the last entry).
    BalancingBiases,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ParamGroup {
    Embedding,
    Experts,
    Attention,
    Router,
    ResidualScaling,
    Norms,
}

impl ParamGroup {
    pub const ALL: [ParamGroup; 6] =
        [Self::Embedding, Self::Experts, Self::Attention, Self::Router, Self::ResidualScaling, Self::Norms];
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding (tied head)",
            Self::Experts => "experts",
            Self::Attention => "attention (CCA)",
            Self::Router => "routers",
            Self::ResidualScaling => "residual scaling",
            Self::Norms => "norms",
        }
    }
}

/// Where a parameter lives in a native Hugging Face file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HfPlace {
    pub tensor: String,
    /// Shape of this entry there, without the stacking dimension.
    pub shape: Vec<usize>,
    /// `Some(e)`: this entry is slice `e` of the tensor's first dimension.
    pub expert: Option<usize>,
}

#[derive(Debug, Clone)]
pub struct ParamSpec {
    /// Logical name, also in checkpoints: `layers.3.experts.7.gate_up`.
    pub name: String,
    /// Logical shape, 1 to 3 dimensions. Buffers hold it as [shape[0], the rest] (a vector as [1, n]).
    pub shape: Vec<usize>,
    pub init: Init,
    pub optim: OptimKind,
    pub group: ParamGroup,
    pub block: Option<usize>,
    pub expert: Option<usize>,
    pub hf: HfPlace,
}

impl ParamSpec {
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
    /// An expert's gate and up projections in one matrix.
    pub fn is_gate_up(&self) -> bool {
        self.expert.is_some() && self.name.ends_with(".gate_up")
    }
    /// `[rows, cols]` of the buffer that holds this parameter.
    pub fn matrix_shape(&self) -> [usize; 2] {
        match self.shape.as_slice() {
            [n] => [1, *n],
            [rows, rest @ ..] => [*rows, rest.iter().product()],
            [] => [1, 1],
        }
    }
}

/// Ids of the four vectors of one residual merge: `(branch + branch_bias) * branch_scale + (stream + stream_bias) * stream_scale`.
#[derive(Debug, Clone, Copy)]
pub struct MergeIds {
    pub branch_scale: ParamId,
    pub branch_bias: ParamId,
    pub stream_scale: ParamId,
    pub stream_bias: ParamId,
}

#[derive(Debug, Clone, Copy)]
pub struct AttentionIds {
    pub norm: ParamId,
    pub q: ParamId,
    pub k: ParamId,
    pub v_current: ParamId,
    pub v_delayed: ParamId,
    pub conv0_weight: ParamId,
    pub conv0_bias: ParamId,
    pub conv1_weight: ParamId,
    pub conv1_bias: ParamId,
    pub temp: ParamId,
    pub o: ParamId,
    pub merge: MergeIds,
}

#[derive(Debug, Clone, Copy)]
pub struct MoeIds {
    pub norm: ParamId,
    pub router_down_weight: ParamId,
    pub router_down_bias: ParamId,
    /// None in the first block, which has no router before it.
    pub router_gamma: Option<ParamId>,
    pub router_norm: ParamId,
    pub router_fc1_weight: ParamId,
    pub router_fc1_bias: ParamId,
    pub router_fc2_weight: ParamId,
    pub router_fc2_bias: ParamId,
    pub router_out: ParamId,
    pub balancing_biases: ParamId,
    /// First of 2E consecutive entries: gate_up and down of expert 0, of expert 1, ...
    pub experts: ParamId,
    pub merge: MergeIds,
}

#[derive(Debug, Clone, Copy)]
pub struct BlockIds {
    pub attention: AttentionIds,
    pub moe: MoeIds,
}

#[derive(Debug, Clone)]
pub struct ParamTable {
    pub specs: Vec<ParamSpec>,
    pub embed: ParamId,
    pub input_scale: ParamId,
    pub input_bias: ParamId,
    pub blocks: Vec<BlockIds>,
    pub final_norm: ParamId,
}

/// Collects specs; one method call is one entry.
struct Builder {
    specs: Vec<ParamSpec>,
    block: Option<usize>,
}

impl Builder {
    fn add(&mut self, name: String, shape: &[usize], init: Init, optim: OptimKind, group: ParamGroup, hf: &str) -> ParamId {
        self.add_shaped(name, shape, init, optim, group, hf.to_string(), shape.to_vec(), None)
    }

    #[allow(clippy::too_many_arguments)]
    fn add_shaped(
        &mut self,
        name: String,
        shape: &[usize],
        init: Init,
        optim: OptimKind,
        group: ParamGroup,
        hf_tensor: String,
        hf_shape: Vec<usize>,
        expert: Option<usize>,
    ) -> ParamId {
        self.specs.push(ParamSpec {
            name,
            shape: shape.to_vec(),
            init,
            optim,
            group,
            block: self.block,
            expert,
            hf: HfPlace { tensor: hf_tensor, shape: hf_shape, expert },
        });
        self.specs.len() - 1
    }

    fn merge(&mut self, name: &str, hf: &str, d: usize) -> MergeIds {
        let mut one = |part: &str, hf_part: &str, value: f32| {
            self.add(
                format!("{name}.{part}"),
                &[d],
                Init::Const(value),
                OptimKind::AdamW,
                ParamGroup::ResidualScaling,
                &format!("{hf}.{hf_part}"),
            )
        };
        MergeIds {
            branch_scale: one("branch_scale", "hidden_states_scale", 1.0),
            branch_bias: one("branch_bias", "hidden_states_bias", 0.0),
            stream_scale: one("stream_scale", "residual_scale", 1.0),
            stream_bias: one("stream_bias", "residual_bias", 0.0),
        }
    }
}

impl ParamTable {
    /// In what the parameters of another model differ from these, the recipe's, in words; None when they do not.
    pub fn difference_from(&self, theirs: &Self) -> Option<String> {
        let shapes = |t: &Self| t.specs.iter().map(|s| (s.name.clone(), s.shape.clone())).collect::<Vec<_>>();
        let (theirs, ours) = (shapes(theirs), shapes(self));
        if theirs == ours {
            return None;
        }
        Some(match theirs.iter().zip(&ours).find(|(a, b)| a != b) {
            Some(((name, a), (other, b))) if name == other => format!("`{name}` is {a:?} there and {b:?} in the recipe"),
            _ => format!("it has {} parameter tensors, the recipe's model {}", theirs.len(), ours.len()),
        })
    }

    pub fn new(cfg: &ModelConfig) -> Self {
        use Init::*;
        use OptimKind::*;
        use ParamGroup::*;
        let (d, f, r, e) = (cfg.hidden_size, cfg.expert_width, cfg.router_width, cfg.num_experts);
        let (q, kv, conv, head) = (cfg.q_dim(), cfg.kv_dim(), cfg.conv_dim(), cfg.head_dim);
        let mut b = Builder { specs: Vec::new(), block: None };

        let embed = b.add(
            "embed".into(),
            &[cfg.vocab_size, d],
            Init::Embedding,
            AdamW,
            ParamGroup::Embedding,
            "model.embed_tokens.weight",
        );
        let input_scale =
            b.add("input.scale".into(), &[d], Const(1.0), AdamW, ResidualScaling, "model.input_hidden_states_scale");
        let input_bias = b.add("input.bias".into(), &[d], Const(0.0), AdamW, ResidualScaling, "model.input_hidden_states_bias");

        let mut blocks = Vec::with_capacity(cfg.num_blocks());
        for i in 0..cfg.num_blocks() {
            b.block = Some(i);
            let (n, hf) = (format!("layers.{i}"), format!("model.layers.{i}"));
            let qkv = format!("{hf}.self_attn.qkv_proj");
            let attention = AttentionIds {
                norm: b.add(format!("{n}.attn.norm"), &[d], Const(1.0), AdamW, Norms, &format!("{hf}.input_layernorm.weight")),
                q: b.add(format!("{n}.attn.q"), &[q, d], Normal, Muon, Attention, &format!("{qkv}.q_proj.weight")),
                k: b.add(format!("{n}.attn.k"), &[kv, d], Normal, Muon, Attention, &format!("{qkv}.k_proj.weight")),
                v_current: b.add(
                    format!("{n}.attn.v_current"),
                    &[kv / 2, d],
                    Normal,
                    Muon,
                    Attention,
                    &format!("{qkv}.v_proj_current.weight"),
                ),
                v_delayed: b.add(
                    format!("{n}.attn.v_delayed"),
                    &[kv / 2, d],
                    Normal,
                    Muon,
                    Attention,
                    &format!("{qkv}.v_proj_delayed.weight"),
                ),
                conv0_weight: b.add_shaped(
                    format!("{n}.attn.conv0.weight"),
                    &[conv, 2],
                    Normal,
                    AdamW,
                    Attention,
                    format!("{qkv}.conv_qk_depthwise.weight"),
                    vec![conv, 1, 2],
                    None,
                ),
                conv0_bias: b.add(
                    format!("{n}.attn.conv0.bias"),
                    &[conv],
                    Const(0.0),
                    AdamW,
                    Attention,
                    &format!("{qkv}.conv_qk_depthwise.bias"),
                ),
                conv1_weight: b.add(
                    format!("{n}.attn.conv1.weight"),
                    &[conv, head, 2],
                    Normal,
                    AdamW,
                    Attention,
                    &format!("{qkv}.conv_qk_grouped.weight"),
                ),
                conv1_bias: b.add(
                    format!("{n}.attn.conv1.bias"),
                    &[conv],
                    Const(0.0),
                    AdamW,
                    Attention,
                    &format!("{qkv}.conv_qk_grouped.bias"),
                ),
                temp: b.add(
                    format!("{n}.attn.temp"),
                    &[cfg.num_kv_heads],
                    Const(1.0),
                    AdamW,
                    Attention,
                    &format!("{hf}.self_attn.qk_norm.temp"),
                ),
                o: b.add(format!("{n}.attn.o"), &[d, q], Normal, Muon, Attention, &format!("{hf}.self_attn.o_proj.weight")),
                merge: b.merge(&format!("{n}.attn_merge"), &format!("{hf}.post_attention_residual_scale"), d),
            };
            let gate = format!("{hf}.mlp.gate");
            let moe_norm =
                b.add(format!("{n}.moe.norm"), &[d], Const(1.0), AdamW, Norms, &format!("{hf}.post_attention_layernorm.weight"));
            let router_down_weight =
                b.add(format!("{n}.router.down.weight"), &[r, d], Normal, Muon, Router, &format!("{gate}.down_proj.weight"));
            let router_down_bias =
                b.add(format!("{n}.router.down.bias"), &[r], Const(0.0), AdamW, Router, &format!("{gate}.down_proj.bias"));
            let router_gamma = (i > 0).then(|| {
                b.add(format!("{n}.router.gamma"), &[r], Const(1.0), AdamW, Router, &format!("{gate}.router_states_scale"))
            });
            let router_norm =
                b.add(format!("{n}.router.norm"), &[r], Const(1.0), AdamW, Router, &format!("{gate}.router_mlp.norm.weight"));
            let router_fc1_weight =
                b.add(format!("{n}.router.fc1.weight"), &[r, r], Normal, Muon, Router, &format!("{gate}.router_mlp.fc1.weight"));
            let router_fc1_bias =
                b.add(format!("{n}.router.fc1.bias"), &[r], Const(0.0), AdamW, Router, &format!("{gate}.router_mlp.fc1.bias"));
            let router_fc2_weight =
                b.add(format!("{n}.router.fc2.weight"), &[r, r], Normal, Muon, Router, &format!("{gate}.router_mlp.fc2.weight"));
            let router_fc2_bias =
                b.add(format!("{n}.router.fc2.bias"), &[r], Const(0.0), AdamW, Router, &format!("{gate}.router_mlp.fc2.bias"));
            let router_out = b.add(
                format!("{n}.router.out"),
                &[e + 1, r],
                Normal,
                Muon,
                Router,
                &format!("{gate}.router_mlp.out_proj.weight"),
            );
            let balancing_biases = b.add(
                format!("{n}.router.balancing_biases"),
                &[e + 1],
                BalancingBiases,
                Balance,
                Router,
                &format!("{gate}.balancing_biases"),
            );
            let experts = b.specs.len();
            for x in 0..e {
                for (part, shape, hf_part) in [("gate_up", [2 * f, d], "gate_up_proj"), ("down", [d, f], "down_proj")] {
                    b.add_shaped(
                        format!("{n}.experts.{x}.{part}"),
                        &shape,
                        Normal,
                        Muon,
                        Experts,
                        format!("{hf}.mlp.experts.{hf_part}"),
                        shape.to_vec(),
                        Some(x),
                    );
                }
            }
            let merge = b.merge(&format!("{n}.moe_merge"), &format!("{hf}.post_mlp_residual_scale"), d);
            blocks.push(BlockIds {
                attention,
                moe: MoeIds {
                    norm: moe_norm,
                    router_down_weight,
                    router_down_bias,
                    router_gamma,
                    router_norm,
                    router_fc1_weight,
                    router_fc1_bias,
                    router_fc2_weight,
                    router_fc2_bias,
                    router_out,
                    balancing_biases,
                    experts,
                    merge,
                },
            });
        }
        b.block = None;
        let final_norm = b.add("final_norm".into(), &[d], Const(1.0), AdamW, Norms, "model.norm.weight");
        Self { specs: b.specs, embed, input_scale, input_bias, blocks, final_norm }
    }

    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.specs.iter().position(|s| s.name == name)
    }

    /// Trained parameters (balancing biases are state, not parameters).
    pub fn total(&self) -> u64 {
        self.specs.iter().filter(|s| s.optim != OptimKind::Balance).map(|s| s.numel() as u64).sum()
    }

    /// Parameters of one group.
    pub fn in_group(&self, group: ParamGroup) -> u64 {
        self.specs.iter().filter(|s| s.group == group && s.optim != OptimKind::Balance).map(|s| s.numel() as u64).sum()
    }

    /// Parameters that work on one token: all but the embedding and the experts not chosen (top-1).
    pub fn active_without_embedding(&self) -> u64 {
        self.specs
            .iter()
            .filter(|s| s.optim != OptimKind::Balance && s.group != ParamGroup::Embedding && s.expert.is_none_or(|e| e == 0))
            .map(|s| s.numel() as u64)
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::presets;

    #[test]
    fn zaya1_base_has_the_published_size() {
        let table = ParamTable::new(&presets::zaya1_base());
        assert_eq!(table.total(), 8_840_488_784);
        assert_eq!(table.active_without_embedding(), 753_608_528);
        assert_eq!(table.in_group(ParamGroup::Embedding), 537_133_056);
        assert_eq!(table.in_group(ParamGroup::Experts), 8_053_063_680);
    }
}
