//! Vector comparisons: one bit per lane.

use std::cmp::Ordering;
use std::num::FpCategory;

use super::WAVE;
use super::wave::Wave;
use crate::isa::instruction::{CompareType, Operand, Relation};

/// Whether `relation` holds for operands that compare as `order` (`None`: a NaN is among them).
#[inline(always)]
fn holds(relation: Relation, order: Option<Ordering>) -> bool {
    use Ordering::{Equal, Greater, Less};
    match relation {
        Relation::Never | Relation::Class => false,
        Relation::Always => true,
        Relation::Less => order == Some(Less),
        Relation::Equal => order == Some(Equal),
        Relation::LessEqual => matches!(order, Some(Less | Equal)),
        Relation::Greater => order == Some(Greater),
        Relation::LessGreater => matches!(order, Some(Less | Greater)),
        Relation::GreaterEqual => matches!(order, Some(Greater | Equal)),
        Relation::Ordered => order.is_some(),
        Relation::Unordered => order.is_none(),
        Relation::NotGreaterEqual => !matches!(order, Some(Greater | Equal)),
        Relation::NotLessGreater => !matches!(order, Some(Less | Greater)),
        Relation::NotGreater => order != Some(Greater),
        Relation::NotLessEqual => !matches!(order, Some(Less | Equal)),
        Relation::NotEqual => order != Some(Equal),
        Relation::NotLess => order != Some(Less),
    }
}

/// `v_cmp_class_f32`: whether the class of `bits` is among those of `mask`.
fn in_class(bits: u32, mask: u32) -> bool {
    let x = f32::from_bits(bits);
    let negative = x.is_sign_negative();
    let class = match (x.classify(), negative) {
        (FpCategory::Nan, _) => u32::from(bits & 0x0040_0000 != 0),
        (FpCategory::Infinite, true) => 2,
        (FpCategory::Normal, true) => 3,
        (FpCategory::Subnormal, true) => 4,
        (FpCategory::Zero, true) => 5,
        (FpCategory::Zero, false) => 6,
        (FpCategory::Subnormal, false) => 7,
        (FpCategory::Normal, false) => 8,
        (FpCategory::Infinite, false) => 9,
    };
    mask >> class & 1 == 1
}

/// Mask of the lanes (of all 64) for which the relation holds.
pub fn run(wave: &Wave, relation: Relation, kind: CompareType, sources: &[Operand; 2]) -> u64 {
    let gather = |test: &dyn Fn(usize) -> bool| (0..WAVE).fold(0u64, |mask, lane| mask | u64::from(test(lane)) << lane);
    if matches!(kind, CompareType::F64 | CompareType::I64 | CompareType::U64) {
        let (a, b) = (wave.lanes64(&sources[0]), wave.lanes64(&sources[1]));
        return gather(&|lane| {
            let (a, b) = (a[lane], b[lane]);
            let order = match kind {
                CompareType::F64 => f64::from_bits(a).partial_cmp(&f64::from_bits(b)),
                CompareType::I64 => Some((a as i64).cmp(&(b as i64))),
                _ => Some(a.cmp(&b)),
            };
            holds(relation, order)
        });
    }
    let (mut space_a, mut space_b) = ([0; WAVE], [0; WAVE]);
    let a = wave.lanes(&sources[0], &mut space_a);
    let b = wave.lanes(&sources[1], &mut space_b);
    if relation == Relation::Class {
        return gather(&|lane| in_class(a[lane], b[lane]));
    }
    gather(&|lane| {
        let (a, b) = (a[lane], b[lane]);
        let order = match kind {
            CompareType::F32 => f32::from_bits(a).partial_cmp(&f32::from_bits(b)),
            CompareType::I32 => Some((a as i32).cmp(&(b as i32))),
            CompareType::U32 => Some(a.cmp(&b)),
            CompareType::I16 => Some((a as i16).cmp(&(b as i16))),
            _ => Some((a as u16).cmp(&(b as u16))),
        };
        holds(relation, order)
    })
}
