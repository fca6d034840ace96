//! Names: of checkpoint folders, and of the tensors that a training state consists of.

use super::layout::TensorInfo;
use crate::model::params::{OptimKind, ParamTable};
use crate::optim::balance::Rule;

/// Prefix of optimizer state: `opt/<parameter>/<slot>`.
const OPT: &str = "opt/";

/// Folder of a step: `step-00000100`.
pub fn step_dir(step: u64) -> String {
    format!("step-{step:08}")
}

/// Step of a checkpoint folder. Only the exact form that [`step_dir`] writes counts: `step-100.backup`, `xstep-7` and
/// `step-00000100.tmp-...` are somebody else's and are never selected or deleted.
pub fn parse_step_dir(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (step_dir(step) == name).then_some(step)
}

/// Name of a folder that is being written or deleted: `step-00000100.tmp-<uuid>`.
pub(super) fn tmp_dir(step: u64) -> String {
    format!("{}.tmp-{}", step_dir(step), uuid::Uuid::new_v4())
}

/// Is this one of our own temporary folders?
pub(super) fn is_tmp_dir(name: &str) -> bool {
    name.split_once(".tmp-").is_some_and(|(step, id)| {
        parse_step_dir(step).is_some() && id.len() == 36 && uuid::Uuid::try_parse(id).is_ok_and(|u| u.to_string() == id)
    })
}

/// Name of an optimizer tensor.
pub fn opt_name(param: &str, slot: &str) -> String {
    format!("{OPT}{param}/{slot}")
}

/// Parameter and slot of an optimizer tensor's name; None for a weight.
pub fn split_opt_name(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix(OPT)?.rsplit_once('/')
}

/// Does this tensor belong to an optimizer (and not to the model)?
pub fn is_optimizer(name: &str) -> bool {
    name.starts_with(OPT)
}

/// The model's tensors, in table order, all f32 (the master weights).
pub fn weight_tensors(table: &ParamTable) -> Vec<TensorInfo> {
    table.specs.iter().map(|s| TensorInfo::f32(&s.name, &s.shape)).collect()
}

/// Every tensor of a training state: the master weights in table order, then `opt/<name>/mom` (Muon), `opt/<name>/m` and
/// `opt/<name>/v` (AdamW), and the balancing controller's slots.
pub fn training_tensors(table: &ParamTable, rule: &Rule) -> Vec<TensorInfo> {
    let mut out = weight_tensors(table);
    for spec in &table.specs {
        let slots: &[&str] = match spec.optim {
            OptimKind::Muon => &["mom"],
            OptimKind::AdamW => &["m", "v"],
            OptimKind::Balance => rule.slots(),
        };
        out.extend(slots.iter().map(|slot| TensorInfo::f32(&opt_name(&spec.name, slot), &spec.shape)));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_folder_names_count() {
        assert_eq!(step_dir(100), "step-00000100");
        assert_eq!(parse_step_dir("step-00000100"), Some(100));
        assert_eq!(parse_step_dir("step-123456789012"), Some(123_456_789_012));
        for other in [
            "step-100",
            "step-00000100.backup",
            "step-100.backup",
            "xstep-7",
            "step-",
            "step-+0000001",
            "step-000000100",
            "step-99999999999999999999999",
            "step-00000100.tmp-x",
            " step-00000100",
        ] {
            assert_eq!(parse_step_dir(other), None, "{other}");
        }
        assert!(is_tmp_dir(&tmp_dir(7)));
        for other in ["step-5.tmp-x", "step-00000005.tmp-x", "step-00000005", "x.tmp-0"] {
            assert!(!is_tmp_dir(other), "{other}");
        }
    }
}
