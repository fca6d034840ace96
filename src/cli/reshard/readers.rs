//! `--for dp=8,cp=2,ep=4`: the layout that a checkpoint is to be read by, and what it reads.

use std::collections::BTreeSet;

use anyhow::Result;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::repack::reader_groups;
use crate::error::did_you_mean;
use crate::parallel::Layout;

/// Sizes as given; the model says later whether they are possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    dp: usize,
    cp: usize,
    ep: usize,
}

impl std::str::FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut sizes = Self { dp: 1, cp: 1, ep: 1 };
        for item in text.split(',') {
            let (name, n) = item.trim().split_once('=').ok_or_else(|| format!("`{item}` is not of the form dp=8"))?;
            let n = n.parse().ok().filter(|n| (1..=1 << 20).contains(n));
            let n = n.ok_or_else(|| format!("`{item}` needs a whole number of at least 1"))?;
            match name {
                "dp" => sizes.dp = n,
                "cp" => sizes.cp = n,
                "ep" => sizes.ep = n,
                other => {
                    let hint = did_you_mean(other, ["dp", "cp", "ep"]);
                    return Err(format!("there is no `{other}`{hint}: expected dp, cp and ep, as in dp=8,cp=2,ep=4"));
                }
            }
        }
        Ok(sizes)
    }
}

impl Sizes {
    /// # Errors
    /// `BadInput` when a model of so many experts cannot be shared like this.
    pub fn layout(self, num_experts: usize) -> Result<Layout> {
        Layout::new(self.dp * self.cp, self.cp, self.ep, num_experts)
    }
}

/// Files that the ranks of each expert-parallel place read: those with tensors that all have, and with their own experts.
fn files_read(checkpoint: &Checkpoint, layout: Layout) -> Vec<usize> {
    let groups = reader_groups(&checkpoint.meta().model, layout, &checkpoint.tensors());
    let entries = &checkpoint.manifest().entries;
    let of_place = |place: usize| {
        let read = entries.iter().zip(&groups).filter(|(_, group)| **group == 0 || **group == place + 1);
        read.flat_map(|(e, _)| &e.parts).map(|p| &p.file).collect::<BTreeSet<_>>().len()
    };
    (0..layout.ep).map(of_place).collect()
}

/// Tells what a rank reads of the checkpoint now, and what it read of the one before.
pub fn tell_of(before: &Checkpoint, after: &Checkpoint, layout: Layout) {
    let span = |files: Vec<usize>| match (files.iter().min(), files.iter().max()) {
        (Some(a), Some(b)) if a == b => a.to_string(),
        (Some(a), Some(b)) => format!("{a} to {b}"),
        _ => "0".into(),
    };
    say!(
        "for {} ranks (dp {}, cp {}, ep {}): a rank finds what it needs in {} of {} files; in the input it was in {} of {}",
        layout.world,
        layout.replicas(),
        layout.cp,
        layout.ep,
        span(files_read(after, layout)),
        after.manifest().files.len(),
        span(files_read(before, layout)),
        before.manifest().files.len()
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_mistakes_named() {
        assert_eq!("dp=8,cp=2,ep=4".parse(), Ok(Sizes { dp: 8, cp: 2, ep: 4 }));
        assert_eq!("dp=1".parse(), Ok(Sizes { dp: 1, cp: 1, ep: 1 }));
        assert!("dp".parse::<Sizes>().unwrap_err().contains("dp=8"));
        assert!("dp=0".parse::<Sizes>().unwrap_err().contains("at least 1"));
        assert!("tp=2".parse::<Sizes>().unwrap_err().contains("expected dp, cp and ep"));
        assert!("dp=3,ep=2".parse::<Sizes>().unwrap().layout(4).is_err());
    }
}
