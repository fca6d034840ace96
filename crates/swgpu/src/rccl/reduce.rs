//! Reductions over ranks, in rank order.

use half::bf16;

use super::{Failure, INVALID_ARGUMENT, failure};

/// Bytes of one element of `ncclDataType_t`.
pub fn element_bytes(element: i32) -> Result<usize, Failure> {
    match element {
        0 | 1 => Ok(1),
        2 | 3 | 7 => Ok(4),
        4 => Ok(8),
        9 => Ok(2),
        other => failure(INVALID_ARGUMENT, format!("element type {other}; i8, u8, i32, u32, i64, f32 and bf16 are served")),
    }
}

const SUM: i32 = 0;
const MAX: i32 = 2;
const MIN: i32 = 3;
const AVERAGE: i32 = 4;

pub fn check_reduction(reduction: i32) -> Result<(), Failure> {
    match reduction {
        SUM | MAX | MIN | AVERAGE => Ok(()),
        other => failure(INVALID_ARGUMENT, format!("reduction {other}; sum, max, min and average are served")),
    }
}

fn fold_floats(reduction: i32, ranks: usize, values: impl Iterator<Item = f32>) -> f32 {
    let combined = values.reduce(|a, b| match reduction {
        MAX => a.max(b),
        MIN => a.min(b),
        _ => a + b,
    });
    let combined = combined.unwrap_or(0.0);
    if reduction == AVERAGE { combined / ranks as f32 } else { combined }
}

fn fold_integers(reduction: i32, ranks: usize, values: impl Iterator<Item = i64>) -> i64 {
    let combined = values.reduce(|a, b| match reduction {
        MAX => a.max(b),
        MIN => a.min(b),
        _ => a.wrapping_add(b),
    });
    let combined = combined.unwrap_or(0);
    if reduction == AVERAGE { combined / ranks as i64 } else { combined }
}

/// Combines equally long parts of all ranks, which come in rank order.
pub fn reduce(element: i32, reduction: i32, parts: &[&[u8]]) -> Vec<u8> {
    let ranks = parts.len();
    let bytes = element_bytes(element).unwrap_or(1);
    let count = parts.first().map_or(0, |part| part.len() / bytes);
    /// One type's loop: how to read a value, and how to write the combined one.
    macro_rules! fold {
        ($fold:ident, $type:ty, $read:expr, $write:expr) => {{
            let value = |part: &[u8], index: usize| {
                let mut raw = [0; size_of::<$type>()];
                raw.copy_from_slice(&part[index * size_of::<$type>()..][..size_of::<$type>()]);
                $read(<$type>::from_le_bytes(raw))
            };
            let combine = |index: usize| $write($fold(reduction, ranks, parts.iter().map(|part| value(part, index))));
            (0..count).flat_map(|index| <$type>::to_le_bytes(combine(index))).collect()
        }};
    }
    match element {
        0 => fold!(fold_integers, i8, i64::from, |x| x as i8),
        1 => fold!(fold_integers, u8, i64::from, |x| x as u8),
        2 => fold!(fold_integers, i32, i64::from, |x| x as i32),
        3 => fold!(fold_integers, u32, i64::from, |x| x as u32),
        4 => fold!(fold_integers, i64, i64::from, |x| x),
        7 => fold!(fold_floats, f32, f32::from, |x| x),
        _ => fold!(fold_floats, u16, |bits| bf16::from_bits(bits).to_f32(), |x| bf16::from_f32(x).to_bits()),
    }
}
