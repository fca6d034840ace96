//! Tokens in a source's shards, counted from file sizes and index headers alone.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::recipe::DataSource;

/// What a data source brings to a run.
#[derive(Debug, Clone)]
pub struct SourcePlan {
    pub name: String,
    /// Share of the run's samples, 0..=1; None for held-out sets.
    pub share: Option<f64>,
    /// Tokens of the run that come from this source.
    pub tokens_used: Option<f64>,
    /// Tokens in its shards; None while one of them is missing or unreadable.
    pub tokens_available: Option<u64>,
    pub missing: Vec<PathBuf>,
    /// Shards that are there and cannot be used, with the reason.
    pub damaged: Vec<String>,
}

impl SourcePlan {
    /// `share`: of the samples that come from this source.
    pub fn of(source: &DataSource, share: Option<f64>) -> Self {
        let (mut missing, mut damaged, mut tokens) = (Vec::new(), Vec::new(), 0);
        for prefix in &source.shards {
            let absent: Vec<PathBuf> = shard_files(prefix).into_iter().filter(|f| !f.is_file()).collect();
            if !absent.is_empty() {
                missing.extend(absent);
                continue;
            }
            match count_tokens(prefix) {
                Ok(n) => tokens += n,
                Err(why) => damaged.push(why),
            }
        }
        Self {
            name: source.name.clone(),
            share,
            tokens_used: None,
            tokens_available: (missing.is_empty() && damaged.is_empty()).then_some(tokens),
            missing,
            damaged,
        }
    }

    /// How often the run goes through the source; None while its size is not known.
    pub fn epochs(&self) -> Option<f64> {
        match (self.tokens_used?, self.tokens_available?) {
            (_, 0) => None,
            (used, available) => Some(used / available as f64),
        }
    }
}

/// Tokens that each source gives to a run of `total`: by its share, up to its limit; what a source cannot give, the others do by their
/// shares. Together less than `total` only where all have reached their limits.
pub fn mixed(total: f64, shares: &[f64], limits: &[Option<f64>]) -> Vec<f64> {
    let mut used = vec![0.0; shares.len()];
    let mut left = total;
    loop {
        let open: Vec<usize> =
            (0..shares.len()).filter(|i| shares[*i] > 0.0 && limits[*i].is_none_or(|limit| used[*i] < limit)).collect();
        let sum: f64 = open.iter().map(|i| shares[*i]).sum();
        if open.is_empty() || left <= 0.0 {
            return used;
        }
        // Until the first of them ends, or the run does.
        let end = |i: &usize| limits[*i].map_or(f64::INFINITY, |limit| (limit - used[*i]) / shares[*i] * sum);
        let until = open.iter().map(end).fold(left, f64::min);
        for i in open {
            used[i] += until * shares[i] / sum;
            if let Some(limit) = limits[i].filter(|limit| limit - used[i] < 1e-6 * limit.max(1.0)) {
                used[i] = limit;
            }
        }
        left -= until;
    }
}

/// `prefix.bin` and `prefix.idx`. (Not `with_extension`: a prefix may hold dots.)
pub fn shard_files(prefix: &Path) -> [PathBuf; 2] {
    ["bin", "idx"].map(|end| {
        let mut name = prefix.as_os_str().to_os_string();
        name.push(".");
        name.push(end);
        PathBuf::from(name)
    })
}

/// Tokens of one Megatron shard: size of the `.bin` over the width that the `.idx` states.
fn count_tokens(prefix: &Path) -> Result<u64, String> {
    let [bin, idx] = shard_files(prefix);
    let cannot = |file: &Path, why: String| format!("{}: {why}", file.display());
    let mut header = [0u8; 18];
    File::open(&idx)
        .and_then(|mut f| f.read_exact(&mut header))
        .map_err(|e| cannot(&idx, format!("cannot read the index header: {e}")))?;
    if &header[..9] != b"MMIDIDX\0\0" {
        return Err(cannot(&idx, "not a Megatron index: it does not begin with MMIDIDX".into()));
    }
    let version = header[9..17].iter().rev().fold(0u64, |v, b| v << 8 | *b as u64);
    if version != 1 {
        return Err(cannot(&idx, format!("version {version} of the Megatron index is not known, only 1 is")));
    }
    let width = match header[17] {
        4 => 4,
        8 => 2,
        other => return Err(cannot(&idx, format!("tokens of data type {other}: expected 4 (int32) or 8 (uint16)"))),
    };
    let bytes = bin.metadata().map_err(|e| cannot(&bin, format!("cannot read its size: {e}")))?.len();
    if !bytes.is_multiple_of(width) {
        return Err(cannot(&bin, format!("its {bytes} bytes are no whole number of {width}-byte tokens")));
    }
    Ok(bytes / width)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(dir: &Path, name: &str, code: u8, bytes: usize) -> PathBuf {
        let prefix = dir.join(name);
        let [bin, idx] = shard_files(&prefix);
        let mut header = b"MMIDIDX\0\0".to_vec();
        header.extend(1u64.to_le_bytes());
        header.push(code);
        header.extend([0; 16]);
        std::fs::write(idx, header).unwrap();
        std::fs::write(bin, vec![0; bytes]).unwrap();
        prefix
    }

    #[test]
    fn what_a_source_cannot_give_the_others_do() {
        assert_eq!(mixed(100.0, &[0.5, 0.3, 0.2], &[None; 3]), [50.0, 30.0, 20.0]);
        // The first ends at 10 of 20 tokens; of the 80 that follow the others give 48 and 32.
        assert_eq!(mixed(100.0, &[0.5, 0.3, 0.2], &[Some(10.0), None, None]), [10.0, 54.0, 36.0]);
        assert_eq!(mixed(100.0, &[0.5, 0.3, 0.2], &[Some(10.0), Some(54.0), None]), [10.0, 54.0, 36.0]);
        assert_eq!(mixed(100.0, &[0.5, 0.5, 0.0], &[Some(10.0), Some(20.0), None]), [10.0, 20.0, 0.0]);
        assert_eq!(mixed(10.0, &[1.0], &[Some(0.0)]), [0.0]);
    }

    #[test]
    fn tokens_are_counted_and_faults_named() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        assert_eq!(count_tokens(&shard(dir, "a.v1", 8, 200)), Ok(100));
        assert_eq!(count_tokens(&shard(dir, "b", 4, 200)), Ok(50));
        assert!(count_tokens(&shard(dir, "c", 4, 201)).unwrap_err().contains("c.bin"));
        assert!(count_tokens(&shard(dir, "d", 6, 200)).unwrap_err().contains("data type 6"));
        std::fs::write(dir.join("e.idx"), b"MMIDIDX\0").unwrap();
        std::fs::write(dir.join("e.bin"), b"").unwrap();
        assert!(count_tokens(&dir.join("e")).unwrap_err().contains("e.idx"));

        let source =
            DataSource { name: "s".into(), shards: vec![dir.join("a.v1"), dir.join("b")], weight: 1.0, max_epochs: None };
        let plan = SourcePlan { tokens_used: Some(300.0), ..SourcePlan::of(&source, Some(1.0)) };
        assert_eq!((plan.tokens_available, plan.epochs()), (Some(150), Some(2.0)));

        let source =
            DataSource { name: "s".into(), shards: vec![dir.join("a.v1"), dir.join("none")], weight: 1.0, max_epochs: None };
        let plan = SourcePlan { tokens_used: Some(300.0), ..SourcePlan::of(&source, Some(1.0)) };
        assert_eq!((plan.tokens_available, plan.epochs()), (None, None));
        assert_eq!(plan.missing, [dir.join("none.bin"), dir.join("none.idx")]);
    }
}
