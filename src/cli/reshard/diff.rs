//! `zaya reshard diff`: in what two checkpoints differ.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;

use crate::checkpoint::{Checkpoint, Entry, open_checkpoint};
use crate::error::exit_code;
use crate::model::numbers::{Numbers, each_piece};

/// How two tensors of one shape differ.
struct Distance {
    /// Largest difference of two numbers; NaN where one of them is none.
    max_abs: f64,
    /// Norm of the difference over the norm of the first.
    relative: f64,
}

/// What has been seen of two tensors so far.
#[derive(Default)]
struct Seen {
    differ: bool,
    max_abs: f64,
    square: f64,
    square_of_a: f64,
}

impl Seen {
    /// Looks at the next numbers of both.
    fn take(&mut self, a: &[f32], b: &[f32]) {
        self.differ |= a.iter().zip(b).any(|(x, y)| x.to_bits() != y.to_bits());
        for (x, y) in a.iter().zip(b) {
            let (x, d) = (f64::from(*x), f64::from(*x) - f64::from(*y));
            self.square += d * d;
            self.square_of_a += x * x;
            // `max` would pass over a NaN.
            if d.is_nan() || d.abs() > self.max_abs {
                self.max_abs = d.abs();
            }
        }
    }

    /// None when they are the same bits.
    fn distance(&self) -> Option<Distance> {
        // Of nothing, any difference is infinitely large.
        let relative = if self.square == 0.0 { 0.0 } else { (self.square / self.square_of_a).sqrt() };
        self.differ.then_some(Distance { max_abs: self.max_abs, relative })
    }
}

/// Two tensors of `count` numbers, in pieces. Nothing is said of them before all hashes are checked.
fn distance(count: usize, mut a: Numbers, mut b: Numbers, buffers: &mut [Vec<f32>; 2]) -> Result<Option<Distance>> {
    let mut seen = Seen::default();
    let [of_a, of_b] = buffers;
    each_piece(&mut a, count, of_a, &mut |piece| {
        if of_b.len() < piece.len() {
            of_b.resize(piece.len(), 0.0);
        }
        let other = &mut of_b[..piece.len()];
        b(other)?;
        seen.take(piece, other);
        Ok(())
    })?;
    Ok(seen.distance())
}

pub fn run(a: &Path, b: &Path) -> Result<u8> {
    let (a, b) = (open_checkpoint(a)?, open_checkpoint(b)?);
    say!("A  {}", a.dir().display());
    say!("B  {}", b.dir().display());
    // Both are always looked at.
    let (meta, tensors) = (meta(&a, &b), tensors(&a, &b)?);
    if meta && tensors {
        say!("equal");
        return Ok(exit_code::OK);
    }
    Ok(exit_code::FAILURE)
}

/// Whether everything beside the tensors is the same.
fn meta(a: &Checkpoint, b: &Checkpoint) -> bool {
    let (x, y) = (a.meta(), b.meta());
    let unknown = |s: &Option<String>| s.clone().unwrap_or_else(|| "unknown".into());
    let json = |m: &_| serde_json::to_string(m).unwrap_or_default();
    let fields = [
        ("contents", format!("{:?}", a.contents()).to_lowercase(), format!("{:?}", b.contents()).to_lowercase()),
        ("step", x.step.to_string(), y.step.to_string()),
        ("tokens seen", x.tokens_seen.to_string(), y.tokens_seen.to_string()),
        ("model", a.manifest().model_hash.clone(), b.manifest().model_hash.clone()),
        ("tokenizer", unknown(&x.tokenizer_hash), unknown(&y.tokenizer_hash)),
        ("data", unknown(&x.data_fingerprint), unknown(&y.data_fingerprint)),
        ("loader", x.loader.to_string(), y.loader.to_string()),
        ("scalars", json(&x.scalars), json(&y.scalars)),
    ];
    let mut same = true;
    for (name, of_a, of_b) in fields.iter().filter(|(_, a, b)| a != b) {
        same = false;
        say!("{name}: A {of_a}, B {of_b}");
    }
    if x.recipe != y.recipe {
        same = false;
        let lines = |text: &str| full_keys(text);
        let (of_a, of_b) = (lines(&x.recipe), lines(&y.recipe));
        of_a.difference(&of_b).for_each(|line| say!("recipe: A {line}"));
        of_b.difference(&of_a).for_each(|line| say!("recipe: B {line}"));
    }
    same
}

/// The lines of a recipe, each behind the name of its table.
fn full_keys(recipe: &str) -> BTreeSet<String> {
    let mut table = String::new();
    let mut out = BTreeSet::new();
    for line in recipe.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.starts_with('[') && line.ends_with(']') {
            true => table = format!("{line} "),
            false => drop(out.insert(format!("{table}{line}"))),
        }
    }
    out
}

/// Whether all tensors are the same, bit for bit.
fn tensors(a: &Checkpoint, b: &Checkpoint) -> Result<bool> {
    let missing = |from: &Checkpoint, of: &Checkpoint, name: &str| -> usize {
        let only: Vec<&Entry> = from.manifest().entries.iter().filter(|e| of.entry(&e.name).is_none()).collect();
        only.iter().for_each(|e| say!("only in {name}: {} {:?}", e.name, e.shape));
        only.len()
    };
    let mut different = missing(a, b, "A") + missing(b, a, "B");
    let mut compared = 0;
    let mut buffers = [Vec::new(), Vec::new()];
    let both = a.manifest().entries.iter().filter_map(|x| Some((x, b.entry(&x.name)?)));
    for (x, y) in both {
        compared += 1;
        if x.shape != y.shape {
            different += 1;
            say!("{}: shape {:?} in A, {:?} in B", x.name, x.shape, y.shape);
            continue;
        }
        let formats =
            if x.dtype == y.dtype { String::new() } else { format!("  {} in A, {} in B", x.dtype.name(), y.dtype.name()) };
        let found = distance(x.shape.iter().product(), a.numbers(&x.name)?, b.numbers(&y.name)?, &mut buffers)?;
        if let Some(Distance { max_abs, relative }) = found {
            different += 1;
            say!("{}: max abs {max_abs:.3e}, relative norm {relative:.3e}{formats}", x.name);
        }
    }
    say!("{compared} tensors compared, {different} differ or are in one only");
    Ok(different == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        /// Whatever the pieces.
        fn distance(a: &[f32], b: &[f32]) -> Option<Distance> {
            let [whole, one_by_one] = [a.len(), 1].map(|n| {
                let mut seen = Seen::default();
                a.chunks(n).zip(b.chunks(n)).for_each(|(a, b)| seen.take(a, b));
                seen.distance()
            });
            let bits = |d: &Option<Distance>| d.as_ref().map(|d| (d.max_abs.to_bits(), d.relative.to_bits()));
            assert_eq!(bits(&whole), bits(&one_by_one));
            whole
        }
        assert!(distance(&[1.0, f32::NAN], &[1.0, f32::NAN]).is_none());
        let d = distance(&[3.0, 4.0], &[3.0, 4.5]).unwrap();
        assert_eq!((d.max_abs, d.relative), (0.5, 0.1));
        let d = distance(&[0.0], &[-0.0]).unwrap();
        assert_eq!((d.max_abs, d.relative), (0.0, 0.0));
        assert!(distance(&[f32::NAN, 1.0], &[1.0, 1.0]).unwrap().max_abs.is_nan());
        assert_eq!(distance(&[0.0], &[1.0]).unwrap().relative, f64::INFINITY);
    }

    #[test]
    fn keys_carry_their_table() {
        let keys = full_keys("[run]\nseed = 1 \n\n# note\n[train]\nsteps = 2\n");
        assert_eq!(keys.into_iter().collect::<Vec<_>>(), ["[run] seed = 1", "[train] steps = 2"]);
    }
}
