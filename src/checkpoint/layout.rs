//! How tensors are cut into row blocks and dealt to files, before a byte is written.

use std::collections::HashSet;
use std::ops::Range;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::names::is_optimizer;

/// Number format of a tensor on disk. In memory everything is f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dtype {
    F32,
    BF16,
}

impl Dtype {
    /// Bytes of one number.
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::F32 => 4,
            Dtype::BF16 => 2,
        }
    }
    /// The name that safetensors headers and manifests use.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "F32",
            Dtype::BF16 => "BF16",
        }
    }
}

/// A logical tensor: what is to be saved, or what is expected to be there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: Dtype,
}

impl TensorInfo {
    pub fn f32(name: &str, shape: &[usize]) -> Self {
        Self { name: name.to_string(), shape: shape.to_vec(), dtype: Dtype::F32 }
    }
}

/// Rows of a shape (its first dimension; a scalar is one row) and numbers of one row; None when they overflow.
pub(super) fn rows_of(shape: &[usize]) -> Option<(u64, u64)> {
    let mut row = 1u64;
    for d in shape.iter().skip(1) {
        row = row.checked_mul(u64::try_from(*d).ok()?)?;
    }
    let rows = shape.first().map_or(Some(1), |d| u64::try_from(*d).ok())?;
    rows.checked_mul(row)?.checked_mul(8)?;
    Some((rows, row))
}

/// Key of a row block inside its safetensors file: the tensor's own name when it is whole.
pub(super) fn part_key(name: &str, shape: &[usize], rows: &Range<u64>) -> String {
    let (all, _) = rows_of(shape).unwrap_or((0, 0));
    if *rows == (0..all) { name.to_string() } else { format!("{name}#rows={}:{}", rows.start, rows.end) }
}

/// Shape of a row block.
pub(super) fn part_shape(shape: &[usize], rows: &Range<u64>) -> Vec<u64> {
    let mut out: Vec<u64> = shape.iter().map(|d| *d as u64).collect();
    if let Some(first) = out.first_mut() {
        *first = rows.end - rows.start;
    }
    out
}

/// One row block and its place in the data section of its file.
#[derive(Debug)]
pub(super) struct PlannedPart {
    /// Index into the list of tensors.
    pub tensor: usize,
    pub rows: Range<u64>,
    /// Bytes of the data section.
    pub bytes: Range<u64>,
}

#[derive(Debug)]
pub(super) struct PlannedFile {
    pub name: String,
    pub parts: Vec<PlannedPart>,
    /// The safetensors header, its 8-byte length included.
    pub header: Vec<u8>,
    pub data_bytes: u64,
}

impl PlannedFile {
    pub fn size(&self) -> u64 {
        self.header.len() as u64 + self.data_bytes
    }
}

/// Largest row block and largest file, in bytes. A single row is never cut.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub part_bytes: u64,
    pub file_bytes: u64,
}

/// Deals the tensors to files: weights first, then optimizer state, each in the given order (f32 before bf16, so that
/// numbers stay aligned). `suffix` goes into every file name. `groups`: that of each tensor; those of two groups share no file, and
/// the groups follow one another. Empty = one group.
pub(super) fn plan(tensors: &[TensorInfo], groups: &[usize], limits: Limits, suffix: &str) -> Result<Vec<PlannedFile>> {
    let group = |i: usize| groups.get(i).copied().unwrap_or(0);
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|i| (is_optimizer(&tensors[*i].name), group(*i), tensors[*i].dtype == Dtype::BF16));

    let mut names = HashSet::new();
    if let Some(twice) = tensors.iter().find(|t| !names.insert(&t.name)) {
        bail!("tensor {} is in the list twice", twice.name);
    }

    let mut files: Vec<PlannedFile> = Vec::new();
    let mut role_of_last = None;
    let mut group_of_last = None;
    let mut in_role = 0;
    for i in order {
        let t = &tensors[i];
        let Some((rows, row_numbers)) = rows_of(&t.shape) else {
            bail!("tensor {} of shape {:?} is larger than any file can be", t.name, t.shape);
        };
        if t.name.contains('#') || t.name.starts_with("__") {
            bail!("a checkpoint cannot hold a tensor called {:?}: `#` marks row blocks, `__` metadata", t.name);
        }
        let row_bytes = row_numbers * t.dtype.bytes();
        let block = if rows * row_bytes <= limits.part_bytes { rows } else { (limits.part_bytes / row_bytes).max(1) };
        let role = if is_optimizer(&t.name) { "optimizer" } else { "weights" };
        let mut start = 0;
        loop {
            let end = rows.min(start + block);
            let bytes = (end - start) * row_bytes;
            if role_of_last != Some(role) {
                in_role = 0;
            }
            let other_group = group_of_last.replace(group(i)) != Some(group(i));
            let full = files.last().is_none_or(|f| f.data_bytes > 0 && f.data_bytes + bytes > limits.file_bytes);
            if full || other_group || role_of_last != Some(role) {
                files.push(PlannedFile {
                    name: format!("{role}-{in_role:05}{suffix}.safetensors"),
                    parts: Vec::new(),
                    header: Vec::new(),
                    data_bytes: 0,
                });
                role_of_last = Some(role);
                in_role += 1;
            }
            if let Some(file) = files.last_mut() {
                let offset = file.data_bytes;
                file.parts.push(PlannedPart { tensor: i, rows: start..end, bytes: offset..offset + bytes });
                file.data_bytes += bytes;
            }
            start = end;
            if start >= rows {
                break;
            }
        }
    }
    for file in &mut files {
        file.header = header(tensors, file)?;
    }
    Ok(files)
}

/// Where a safetensors header keeps what is no tensor.
pub(super) const METADATA: &str = "__metadata__";

/// What is kept there.
pub(super) fn metadata() -> Value {
    json!({"format": "zck"})
}

/// The safetensors header: a JSON object padded with spaces to a multiple of 8 bytes, behind its length as u64.
fn header(tensors: &[TensorInfo], file: &PlannedFile) -> Result<Vec<u8>> {
    let mut map = Map::new();
    map.insert(METADATA.into(), metadata());
    for part in &file.parts {
        let t = &tensors[part.tensor];
        let value = json!({
            "dtype": t.dtype.name(),
            "shape": part_shape(&t.shape, &part.rows),
            "data_offsets": [part.bytes.start, part.bytes.end],
        });
        map.insert(part_key(&t.name, &t.shape, &part.rows), value);
    }
    let mut text = serde_json::to_vec(&Value::Object(map))?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_tensors_become_row_blocks_and_files_stay_small() {
        let tensors = [
            TensorInfo::f32("opt/a/mom", &[2, 3]),
            TensorInfo::f32("a", &[5, 3]),
            TensorInfo { dtype: Dtype::BF16, ..TensorInfo::f32("b", &[4]) },
            TensorInfo::f32("c", &[]),
            TensorInfo::f32("d", &[0, 7]),
        ];
        let files = plan(&tensors, &[], Limits { part_bytes: 24, file_bytes: 40 }, "").unwrap();
        let dealt: Vec<(String, Vec<String>)> = files
            .iter()
            .map(|f| {
                let keys = f.parts.iter().map(|p| part_key(&tensors[p.tensor].name, &tensors[p.tensor].shape, &p.rows));
                (f.name.clone(), keys.collect())
            })
            .collect();
        let want = [
            ("weights-00000.safetensors", vec!["a#rows=0:2"]),
            ("weights-00001.safetensors", vec!["a#rows=2:4", "a#rows=4:5", "c", "d"]),
            ("weights-00002.safetensors", vec!["b"]),
            ("optimizer-00000.safetensors", vec!["opt/a/mom"]),
        ];
        let want: Vec<(String, Vec<String>)> =
            want.iter().map(|(f, k)| (f.to_string(), k.iter().map(|s| s.to_string()).collect())).collect();
        assert_eq!(dealt, want);
        assert!(files.iter().all(|f| f.header.len() % 8 == 0));
    }

    #[test]
    fn groups_share_no_file() {
        let tensors = ["a", "b", "c", "opt/a/m", "opt/b/m"].map(|name| TensorInfo::f32(name, &[2]));
        let files = plan(&tensors, &[1, 0, 1, 1, 0], Limits { part_bytes: 64, file_bytes: 64 }, "").unwrap();
        let dealt: Vec<Vec<usize>> = files.iter().map(|f| f.parts.iter().map(|p| p.tensor).collect()).collect();
        assert_eq!(dealt, [vec![1], vec![0, 2], vec![4], vec![3]]);
        assert_eq!(files[1].name, "weights-00001.safetensors");
    }

    #[test]
    fn a_row_larger_than_the_limit_stays_whole() {
        let files = plan(&[TensorInfo::f32("a", &[3, 100])], &[], Limits { part_bytes: 8, file_bytes: 8 }, "").unwrap();
        assert_eq!(files.len(), 3);
    }

    #[test]
    fn impossible_lists_are_refused() {
        let limits = Limits { part_bytes: 64, file_bytes: 64 };
        let twice = [TensorInfo::f32("a", &[1]), TensorInfo::f32("a", &[1])];
        assert!(plan(&twice, &[], limits, "").unwrap_err().to_string().contains("twice"));
        assert!(plan(&[TensorInfo::f32("a#rows=0:1", &[1])], &[], limits, "").is_err());
        assert!(plan(&[TensorInfo::f32("a", &[usize::MAX, 2])], &[], limits, "").is_err());
    }
}
