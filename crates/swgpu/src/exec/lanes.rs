//! Moving values between lanes: DPP, `ds_bpermute`, `ds_permute`, `ds_swizzle`.

use super::{Lanes, WAVE};
use crate::isa::instruction::{Dpp, LaneControl};

/// Lane that `lane` reads from, if there is one.
fn source_lane(control: LaneControl, lane: usize) -> Option<usize> {
    let (row, place) = (lane & !15, lane & 15);
    match control {
        LaneControl::QuadPermute(order) => Some((lane & !3) + usize::from(order[lane & 3])),
        LaneControl::RowShiftLeft(by) => Some(place + usize::from(by)).filter(|&from| from < 16).map(|from| row + from),
        LaneControl::RowShiftRight(by) => place.checked_sub(usize::from(by)).map(|from| row + from),
        LaneControl::RowRotateRight(by) => Some(row + (place + 16 - usize::from(by)) % 16),
        LaneControl::WaveShiftLeft => Some(lane + 1).filter(|&from| from < WAVE),
        LaneControl::WaveRotateLeft => Some((lane + 1) % WAVE),
        LaneControl::WaveShiftRight => lane.checked_sub(1),
        LaneControl::WaveRotateRight => Some((lane + WAVE - 1) % WAVE),
        LaneControl::RowMirror => Some(row + 15 - place),
        LaneControl::RowHalfMirror => Some((lane & !7) + 7 - (lane & 7)),
        LaneControl::RowBroadcast15 => row.checked_sub(1),
        LaneControl::RowBroadcast31 => (lane >= 32).then_some(31),
        LaneControl::RowNewBroadcast(from) => Some(row + usize::from(from)),
    }
}

/// The values as the lanes see them through `dpp`, and the mask of lanes that may write their result.
pub fn dpp(values: &Lanes, dpp: &Dpp, exec: u64) -> (Lanes, u64) {
    let (mut moved, mut mask) = ([0; WAVE], 0u64);
    for lane in 0..WAVE {
        let enabled = dpp.row_mask >> (lane / 16) & 1 == 1 && dpp.bank_mask >> (lane % 16 / 4) & 1 == 1;
        let from = source_lane(dpp.control, lane).filter(|&from| exec >> from & 1 == 1);
        if let Some(from) = from {
            moved[lane] = values[from];
        }
        mask |= u64::from(enabled && (from.is_some() || dpp.zero_invalid)) << lane;
    }
    (moved, mask)
}

/// `ds_bpermute_b32`: lane `l` reads from lane `index[l] / 4`; inactive lanes give 0.
pub fn permute_backward(index: &Lanes, data: &Lanes, offset: u32, exec: u64) -> Lanes {
    std::array::from_fn(|lane| {
        let from = (index[lane].wrapping_add(offset) / 4) as usize % WAVE;
        if exec >> from & 1 == 1 { data[from] } else { 0 }
    })
}

/// `ds_permute_b32`: lane `l` sends to lane `index[l] / 4`; the highest sender wins, lanes without one get 0.
pub fn permute_forward(index: &Lanes, data: &Lanes, offset: u32, exec: u64) -> Lanes {
    let mut result = [0; WAVE];
    for lane in (0..WAVE).filter(|lane| exec >> lane & 1 == 1) {
        result[(index[lane].wrapping_add(offset) / 4) as usize % WAVE] = data[lane];
    }
    result
}

/// `ds_swizzle_b32`; inactive source lanes give 0.
pub fn swizzle(data: &Lanes, pattern: u16, exec: u64) -> Lanes {
    std::array::from_fn(|lane| {
        let from = match pattern & 0x8000 != 0 {
            true => (lane & !3) + usize::from(pattern >> (2 * (lane & 3)) & 3),
            false => {
                let [and, or, xor] = [0, 5, 10].map(|shift| usize::from(pattern >> shift & 31));
                (lane & 32) + (((lane & 31 & and) | or) ^ xor)
            }
        };
        if exec >> from & 1 == 1 { data[from] } else { 0 }
    })
}
