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

/// Refuses a recipe that does not make the model of the checkpoint a model of longer context.
pub fn check(recipe: &Recipe, from: &Checkpoint, reset_optimizer: bool, allow_shorter: bool) -> Result<()> {
    let place = from.dir().display();
    let refuse = |text: String| Err(bad_input(format!("extending the context of {place}: {text}")));
    if recipe.num_stages() > 1 {
        return refuse(format!(
            "the recipe has {} stages, and a context is extended by one. Leave one [[stages]] entry, or make the longer context a stage of `zaya \
             pretrain`",
            recipe.num_stages()
        ));
    }
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
    let other: Vec<String> = recipe.resume_differences(&source).refused.into_iter().filter(concerns).collect();
    if !other.is_empty() {
        return refuse(format!("the recipe changes more than the context:\n  - {}\nSet these back", other.join("\n  - ")));
    }
    let (before, now) = (source.train.seq_len, recipe.train.seq_len);
    if now <= before && !allow_shorter {
        return refuse(format!(
            "`train.seq_len` is {now}, and it was trained at {before} tokens already. Set a longer one, or say --allow-shorter"
        ));
    }
    for (key, was, is) in [
        ("model.rope_theta", theirs.rope.theta, ours.rope.theta),
        ("model.rope_theta_sliding", theirs.rope_sliding.theta, ours.rope_sliding.theta),
    ] {
        if is < was {
            return refuse(format!(
                "`{key}` is {is}, smaller than the {was} that it was trained with: positions would turn faster, and far ones would be new to \
                 the model. Set it to {was} or more"
            ));
        }
    }
    Ok(())
}
