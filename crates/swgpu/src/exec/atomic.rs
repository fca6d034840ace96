//! Atomic updates: lane by lane, lowest first.

use half::bf16;

use super::memory_access::{active, addresses};
use super::step::Machine;
use super::wave::Wave;
use crate::isa::instruction::Address;
use crate::isa::names::AtomicOp;
use crate::memory::Segment;

fn add_bf16_pair(old: u32, data: u32) -> u32 {
    let sum = |shift: u32| {
        let value = |bits: u32| bf16::from_bits((bits >> shift) as u16).to_f32();
        u32::from(bf16::from_f32(value(old) + value(data)).to_bits()) << shift
    };
    sum(0) | sum(16)
}

fn update32(op: AtomicOp, old: u32, data: u32, compare: u32) -> u32 {
    use AtomicOp::*;
    let (old_float, data_float) = (f32::from_bits(old), f32::from_bits(data));
    match op {
        add => old.wrapping_add(data),
        sub => old.wrapping_sub(data),
        smin => (old as i32).min(data as i32) as u32,
        smax => (old as i32).max(data as i32) as u32,
        umin => old.min(data),
        umax => old.max(data),
        and => old & data,
        or => old | data,
        xor => old ^ data,
        swap => data,
        cmpswap => {
            if old == compare {
                data
            } else {
                old
            }
        }
        inc => {
            if old >= data {
                0
            } else {
                old + 1
            }
        }
        dec => {
            if old == 0 || old > data {
                data
            } else {
                old - 1
            }
        }
        add_f32 => (old_float + data_float).to_bits(),
        min_f32 => old_float.min(data_float).to_bits(),
        max_f32 => old_float.max(data_float).to_bits(),
        pk_add_bf16 => add_bf16_pair(old, data),
        // The others update 64 bits.
        _ => old,
    }
}

fn update64(op: AtomicOp, old: u64, data: u64, compare: u64) -> u64 {
    use AtomicOp::*;
    match op {
        add_x2 => old.wrapping_add(data),
        sub_x2 => old.wrapping_sub(data),
        smin_x2 => (old as i64).min(data as i64) as u64,
        smax_x2 => (old as i64).max(data as i64) as u64,
        umin_x2 => old.min(data),
        umax_x2 => old.max(data),
        and_x2 => old & data,
        or_x2 => old | data,
        xor_x2 => old ^ data,
        swap_x2 => data,
        cmpswap_x2 => {
            if old == compare {
                data
            } else {
                old
            }
        }
        add_f64 => (f64::from_bits(old) + f64::from_bits(data)).to_bits(),
        _ => old,
    }
}

impl Machine<'_> {
    pub fn atomic(
        &mut self,
        wave: &mut Wave,
        address: &Address,
        op: AtomicOp,
        data: u16,
        returns: Option<u16>,
    ) -> Result<(), String> {
        let exec = wave.exec();
        let bytes = op.bytes();
        let words = bytes / 4;
        let places = addresses(wave, address);
        let data = usize::from(data);
        self.count_read(address.space, exec, bytes as u8);
        self.count_write(address.space, exec, bytes as u8);
        let mut segment = Segment::EMPTY;
        for lane in active(exec) {
            let at = places[lane];
            let fail = |problem: String| format!("lane {lane}: {problem}");
            if !at.is_multiple_of(bytes as u64) {
                return Err(fail(format!("atomic address {at:#x} is no multiple of {bytes}")));
            }
            self.readable(&mut segment, address.space, at, bytes).map_err(fail)?;
            let place = self.writable(&mut segment, address.space, at, bytes).map_err(fail)?;
            let value = |first: usize| {
                let high = if words == 2 { u64::from(wave.vectors[first + 1][lane]) } else { 0 };
                u64::from(wave.vectors[first][lane]) | high << 32
            };
            let compare = if op.compares() { value(data + words) } else { 0 };
            let new = value(data);
            // SAFETY: `readable` and `writable` have checked that the bytes lie in live memory.
            let old = unsafe {
                if words == 1 {
                    let place = place.cast::<u32>();
                    let old = place.read_unaligned();
                    place.write_unaligned(update32(op, old, new as u32, compare as u32));
                    u64::from(old)
                } else {
                    let place = place.cast::<u64>();
                    let old = place.read_unaligned();
                    place.write_unaligned(update64(op, old, new, compare));
                    old
                }
            };
            if let Some(register) = returns {
                for word in 0..words {
                    wave.vectors[usize::from(register) + word][lane] = (old >> (32 * word)) as u32;
                }
            }
        }
        Ok(())
    }
}
