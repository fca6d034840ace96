//! `zaya extend-context`: a trained model goes on at a longer context, as a new run.

use std::path::PathBuf;

use anyhow::Result;

use crate::checkpoint::{Checkpoint, Contents};
use crate::error::bad_input;
use crate::model::ParamTable;
use crate::recipe::{self, Recipe};

/// What a new run begins with.
#[derive(Debug, Clone)]
pub struct Extend {
    /// A checkpoint folder.
    pub from: PathBuf,
    /// Weights only: moments of the optimizer and the balancing controllers begin empty.
    pub reset_optimizer: bool,
}

/// Refuses a recipe that does not make the model of the checkpoint a model of longer context, at once or stage by stage.
pub fn check(recipe: &Recipe, from: &Checkpoint, reset_optimizer: bool, allow_shorter: bool) -> Result<()> {
    let place = from.dir().display();
    let refuse = |text: String| Err(bad_input(format!("extending the context of {place}: {text}")));
    if from.contents() != Contents::Training && !reset_optimizer {
        return refuse("it holds weights only. Begin with empty moments: --reset-optimizer".into());
    }
    let (theirs, ours) = (&from.meta().model, &recipe.model);
    if theirs.vocab_size != ours.vocab_size {
        return refuse(format!(
            "its vocabulary has {} ids, the recipe's `model.vocab_size` is {}: the embedding would not fit. Set it to {}",
            theirs.vocab_size, ours.vocab_size, theirs.vocab_size
        ));
    }
    if let Some(detail) = ParamTable::new(ours).difference_from(&ParamTable::new(theirs)) {
        return refuse(format!("the model there has another shape than the recipe's `model`: {detail}"));
    }
    let whole = recipe::load_resolved(&format!("{place} (its recipe)"), &from.meta().recipe)?;
    // Of several stages the one that made the last step.
    let Some(source) = whole.stage(whole.stage_at(from.meta().step.saturating_sub(1))) else {
        return refuse("its recipe has no stage for its step; the manifest is not one of this program".into());
    };
    // What would make the weights or the moments mean something else; the context apart.
    let concerns = |d: &String| {
        let key = d.trim_start_matches('`').split('`').next().unwrap_or("");
        let moments = !reset_optimizer && ["router.balance", "optimizer.muon_split_gate_up"].contains(&key);
        moments || (key.starts_with("model.") && !key.starts_with("model.rope_theta"))
    };
    // The first of several stages: the rest differ from it in what a stage may say.
    let Some(first) = recipe.stage(0) else {
        return refuse("the recipe has no stage".into());
    };
    let other: Vec<String> = first.resume_differences(&source).refused.into_iter().filter(concerns).collect();
    if !other.is_empty() {
        return refuse(format!("the recipe changes more than the context:\n  - {}\nSet these back", other.join("\n  - ")));
    }
    let (mut last_length, mut last_theta) = (source.train.seq_len, [theirs.rope.theta, theirs.rope_sliding.theta]);
    for (i, stage) in recipe.each_stage().enumerate() {
        let keys = match recipe.num_stages() {
            1 => ["train.seq_len", "model.rope_theta", "model.rope_theta_sliding"].map(String::from),
            _ => ["seq_len", "rope_theta", "rope_theta_sliding"].map(|key| format!("stages.{i}.{key}")),
        };
        let now = stage.train.seq_len;
        // A step of the way may change something else than the length; the first one may not.
        let too_short = if i == 0 { now <= last_length } else { now < last_length };
        if too_short && !allow_shorter {
            return refuse(format!(
                "`{}` is {now}, and it was trained at {last_length} tokens already. Set a longer one, or say --allow-shorter",
                keys[0]
            ));
        }
        let theta = [stage.model.rope.theta, stage.model.rope_sliding.theta];
        for ((key, was), is) in keys[1..].iter().zip(last_theta).zip(theta) {
            if is < was {
                return refuse(format!(
                    "`{key}` is {is}, smaller than the {was} that it was trained with: positions would turn faster, and far ones would be \
                     new to the model. Set it to {was} or more"
                ));
            }
        }
        (last_length, last_theta) = (now, theta);
    }
    Ok(())
}
