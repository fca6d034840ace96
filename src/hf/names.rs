//! Tensor names of the two layouts. Native names stand in the parameter table; the old ones are derived from them here.

use std::collections::HashMap;

use crate::model::params::{OptimKind, ParamSpec, ParamTable};

/// How a file arranges the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// One layer per block, experts stacked: `transformers` 5.13 and later.
    Native,
    /// Two stages per block, each expert apart, `zaya_block` in the names: Zyphra's releases before that.
    Legacy,
    /// `Legacy` with Zyphra's internal `smoe_block` for `zaya_block`.
    LegacySmoe,
}

impl Layout {
    pub const ALL: [Layout; 3] = [Self::Native, Self::Legacy, Self::LegacySmoe];

    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Legacy => "legacy",
            Self::LegacySmoe => "legacy (smoe)",
        }
    }
}

/// One tensor of a file, and the parameters it holds: one, or the experts of a block in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileTensor {
    pub name: String,
    pub shape: Vec<usize>,
    /// Ids in the table; more than one where the first dimension stacks experts.
    pub params: Vec<usize>,
    /// True for balancing biases, which stay in f32 whatever the rest is stored in.
    pub always_f32: bool,
}

/// The tensors that a model's files hold in `layout`, in the order of the table.
pub fn file_tensors(table: &ParamTable, layout: Layout) -> Vec<FileTensor> {
    let mut out: Vec<FileTensor> = Vec::new();
    let mut stacked = HashMap::new();
    for (id, spec) in table.specs.iter().enumerate() {
        let always_f32 = spec.optim == OptimKind::Balance;
        let mut add = |name: String, shape| {
            out.push(FileTensor { name, shape, params: vec![id], always_f32 });
            out.len() - 1
        };
        match (layout, spec.hf.expert) {
            (Layout::Native, Some(_)) => match stacked.get(&spec.hf.tensor) {
                Some(&at) => {
                    let tensor: &mut FileTensor = &mut out[at];
                    tensor.params.push(id);
                    tensor.shape[0] += 1;
                }
                None => {
                    let shape = std::iter::once(1).chain(spec.hf.shape.iter().copied()).collect();
                    let at = add(spec.hf.tensor.clone(), shape);
                    stacked.insert(spec.hf.tensor.clone(), at);
                }
            },
            (Layout::Native, None) => _ = add(spec.hf.tensor.clone(), spec.hf.shape.clone()),
            (Layout::Legacy, _) => _ = add(legacy_name(spec, table.blocks.len(), "zaya_block"), spec.hf.shape.clone()),
            (Layout::LegacySmoe, _) => _ = add(legacy_name(spec, table.blocks.len(), "smoe_block"), spec.hf.shape.clone()),
        }
    }
    out
}

/// Native names within a block, and the old ones: which stage of the pair, and the name there. A prefix stands for all below it.
const IN_BLOCK: [(&str, usize, &str); 17] = [
    ("input_layernorm.", 0, "input_norm."),
    ("self_attn.qkv_proj.q_proj.", 0, "self_attn.qkv.linear_q."),
    ("self_attn.qkv_proj.k_proj.", 0, "self_attn.qkv.linear_k."),
    ("self_attn.qkv_proj.v_proj_current.", 0, "self_attn.qkv.val_proj1."),
    ("self_attn.qkv_proj.v_proj_delayed.", 0, "self_attn.qkv.val_proj2."),
    ("self_attn.qkv_proj.conv_qk_depthwise.", 0, "self_attn.qkv.conv_qk.0."),
    ("self_attn.qkv_proj.conv_qk_grouped.", 0, "self_attn.qkv.conv_qk.1."),
    ("self_attn.qk_norm.", 0, "self_attn.qkv."),
    ("self_attn.o_proj.", 0, "self_attn.o_proj."),
    // A stage begins by merging what the stage before it gave.
    ("post_attention_residual_scale.", 1, "res_scale."),
    ("post_attention_layernorm.", 1, "input_norm."),
    ("mlp.gate.router_mlp.norm.", 1, "BLOCK.router.rmsnorm_eda."),
    ("mlp.gate.router_mlp.fc1.", 1, "BLOCK.router.router_mlp.0."),
    ("mlp.gate.router_mlp.fc2.", 1, "BLOCK.router.router_mlp.2."),
    ("mlp.gate.router_mlp.out_proj.", 1, "BLOCK.router.router_mlp.4."),
    ("mlp.gate.", 1, "BLOCK.router."),
    ("post_mlp_residual_scale.", 2, "res_scale."),
];

/// The old name of a parameter. `moe_name` is what the files call the MoE module.
fn legacy_name(spec: &ParamSpec, blocks: usize, moe_name: &str) -> String {
    let native = spec.hf.tensor.as_str();
    let Some(block) = spec.block else {
        return match native {
            "model.norm.weight" => "model.final_norm.weight".to_string(),
            // The first stage merges nothing and only scales the embedding.
            _ => native.replace("model.input_hidden_states_", "model.layers.0.res_scale.hidden_states_"),
        };
    };
    let inside = native.strip_prefix(&format!("model.layers.{block}.")).unwrap_or(native);
    if let Some(expert) = spec.hf.expert {
        let part = if inside.ends_with("gate_up_proj") { "linear_fc1" } else { "linear_fc2" };
        return format!("model.layers.{}.{moe_name}.experts.local_experts.{expert}.{part}.weight", 2 * block + 1);
    }
    for (prefix, stage, old) in IN_BLOCK {
        if let Some(rest) = inside.strip_prefix(prefix) {
            let stage = 2 * block + stage;
            // What would begin a stage after the last stands in the model itself.
            let at = if stage == 2 * blocks { "model".to_string() } else { format!("model.layers.{stage}") };
            return format!("{at}.{}{rest}", old.replace("BLOCK", moe_name));
        }
    }
    unreachable!("the table has a parameter `{}` without a legacy name", spec.name)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::model::presets;

    /// The counts of ZAYA1-base's published files.
    #[test]
    fn zaya1_base_has_the_published_numbers_of_tensors() {
        let table = ParamTable::new(&presets::zaya1_base());
        for (layout, count) in [(Layout::Native, 1283), (Layout::Legacy, 2483), (Layout::LegacySmoe, 2483)] {
            let tensors = file_tensors(&table, layout);
            assert_eq!(tensors.iter().map(|t| t.name.as_str()).collect::<HashSet<_>>().len(), count);
            assert_eq!(tensors.len(), count);
            let elements: usize = tensors.iter().map(|t| t.shape.iter().product::<usize>()).sum();
            assert_eq!(elements, 8_840_489_464);
            let params: HashSet<usize> = tensors.iter().flat_map(|t| t.params.iter().copied()).collect();
            assert_eq!(params.len(), table.specs.len());
        }
    }

    #[test]
    fn old_names_of_the_places_that_move() {
        let table = ParamTable::new(&presets::zaya1_base());
        let legacy = |name: &str| legacy_name(&table.specs[table.find(name).unwrap()], 40, "zaya_block");
        for (name, old) in [
            ("embed", "model.embed_tokens.weight"),
            ("input.bias", "model.layers.0.res_scale.hidden_states_bias"),
            ("final_norm", "model.final_norm.weight"),
            ("layers.3.attn.norm", "model.layers.6.input_norm.weight"),
            ("layers.3.attn.temp", "model.layers.6.self_attn.qkv.temp"),
            ("layers.3.attn.conv1.bias", "model.layers.6.self_attn.qkv.conv_qk.1.bias"),
            ("layers.3.attn_merge.stream_scale", "model.layers.7.res_scale.residual_scale"),
            ("layers.3.router.gamma", "model.layers.7.zaya_block.router.router_states_scale"),
            ("layers.3.router.norm", "model.layers.7.zaya_block.router.rmsnorm_eda.weight"),
            ("layers.3.router.out", "model.layers.7.zaya_block.router.router_mlp.4.weight"),
            ("layers.3.experts.11.down", "model.layers.7.zaya_block.experts.local_experts.11.linear_fc2.weight"),
            ("layers.3.moe_merge.branch_bias", "model.layers.8.res_scale.hidden_states_bias"),
            ("layers.39.moe_merge.branch_bias", "model.res_scale.hidden_states_bias"),
        ] {
            assert_eq!(legacy(name), old);
        }
    }
}
