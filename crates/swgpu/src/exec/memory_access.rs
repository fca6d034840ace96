//! Loads and stores of global memory and LDS, with every check.

use super::WAVE;
use super::step::Machine;
use super::wave::Wave;
use crate::isa::instruction::{Address, Half, SHARED_APERTURE, Space};
use crate::memory::Segment;

/// Numbers of the active lanes, lowest first.
pub fn active(mask: u64) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(mask), |mask| Some(mask & mask.wrapping_sub(1)))
        .take_while(|&mask| mask != 0)
        .map(|mask| mask.trailing_zeros() as usize)
}

pub fn addresses(wave: &Wave, address: &Address) -> [u64; WAVE] {
    let vector = usize::from(address.vector);
    let low = &wave.vectors[vector];
    match (address.space, address.scalar) {
        // LDS addresses are 32 bits wide, and so is the sum.
        (Space::Lds, _) => std::array::from_fn(|lane| u64::from(low[lane].wrapping_add(address.offset as u32))),
        (_, Some(base)) => {
            let base = wave.read64(base).wrapping_add_signed(address.offset);
            std::array::from_fn(|lane| base.wrapping_add(u64::from(low[lane])))
        }
        _ => {
            let high = &wave.vectors[vector + 1];
            let base = |lane: usize| u64::from(low[lane]) | u64::from(high[lane]) << 32;
            std::array::from_fn(|lane| base(lane).wrapping_add_signed(address.offset))
        }
    }
}

/// A value with one bit flipped that halves or doubles it as a bf16 or f32.
fn corrupted(value: u32, bytes: usize) -> u32 {
    value ^ if bytes < 4 { 0x80 } else { 0x0080_0000 }
}

impl Machine<'_> {
    /// The segment that holds an access, or why there is none.
    pub fn locate(&self, space: Space, address: u64, bytes: usize) -> Result<Segment, String> {
        let in_lds = space == Space::Lds || space == Space::Flat && (address >> 32) as u32 == SHARED_APERTURE;
        if !in_lds {
            return self.view.locate(address, bytes);
        }
        let lds = match space {
            Space::Lds => self.lds,
            _ => {
                let base = u64::from(SHARED_APERTURE) << 32;
                Segment { start: base, end: base + self.lds.end, ..self.lds }
            }
        };
        match lds.contains(address, bytes) {
            true => Ok(lds),
            false => Err(format!("LDS address {address:#x} (+{bytes}) is outside the workgroup's {} bytes of LDS", self.lds.end)),
        }
    }

    /// A checked read: backing memory of `bytes` at `address`.
    #[inline(always)]
    pub fn readable(&self, segment: &mut Segment, space: Space, address: u64, bytes: usize) -> Result<*const u8, String> {
        if !segment.contains(address, bytes) {
            *segment = self.locate(space, address, bytes)?;
        }
        if self.check_unwritten && !segment.is_written(address, bytes) {
            let place = segment.first_unwritten(address, bytes).unwrap_or(address);
            return Err(format!("reads {bytes} bytes at {address:#x}, of which {place:#x} was never written"));
        }
        Ok(segment.place(address))
    }

    /// A checked write: backing memory, already marked as written.
    #[inline(always)]
    pub fn writable(&self, segment: &mut Segment, space: Space, address: u64, bytes: usize) -> Result<*mut u8, String> {
        if !segment.contains(address, bytes) {
            *segment = self.locate(space, address, bytes)?;
        }
        segment.mark(address, bytes, 1);
        Ok(segment.place(address))
    }

    pub fn load(
        &mut self,
        wave: &mut Wave,
        address: &Address,
        dst: u16,
        bytes: u8,
        signed: bool,
        half: Half,
    ) -> Result<(), String> {
        let exec = wave.exec();
        let places = addresses(wave, address);
        self.count_read(address.space, exec, bytes);
        self.pass_caches(address.space, &places, exec, bytes, false);
        self.load_at(wave, address.space, &places, dst, bytes, signed, half, exec)
    }

    /// Loads `bytes` (1, 2 or a multiple of 4) per active lane into registers from `dst` on.
    #[allow(clippy::too_many_arguments)]
    fn load_at(
        &self,
        wave: &mut Wave,
        space: Space,
        places: &[u64; WAVE],
        dst: u16,
        bytes: u8,
        signed: bool,
        half: Half,
        exec: u64,
    ) -> Result<(), String> {
        let dst = usize::from(dst);
        let bytes = usize::from(bytes);
        let mut segment = Segment::EMPTY;
        for lane in active(exec) {
            let place =
                self.readable(&mut segment, space, places[lane], bytes).map_err(|problem| format!("lane {lane}: {problem}"))?;
            if bytes >= 4 {
                for word in 0..bytes / 4 {
                    // SAFETY: `readable` has checked that all `bytes` lie in live memory.
                    wave.vectors[dst + word][lane] = unsafe { place.add(4 * word).cast::<u32>().read_unaligned() };
                }
                continue;
            }
            // SAFETY: as above.
            let raw = unsafe { if bytes == 1 { u16::from(*place) } else { place.cast::<u16>().read_unaligned() } };
            let value = match (bytes, signed) {
                (1, true) => raw as u8 as i8 as u32,
                (2, true) => raw as i16 as u32,
                _ => u32::from(raw),
            };
            let register = &mut wave.vectors[dst][lane];
            *register = match half {
                Half::Whole => value,
                Half::Low => *register & 0xffff_0000 | value & 0xffff,
                Half::High => *register & 0xffff | value << 16,
            };
        }
        Ok(())
    }

    pub fn store(&mut self, wave: &Wave, address: &Address, data: u16, bytes: u8, half: Half) -> Result<(), String> {
        let exec = wave.exec();
        let places = addresses(wave, address);
        self.count_write(address.space, exec, bytes);
        self.pass_caches(address.space, &places, exec, bytes, true);
        self.store_at(wave, address.space, &places, data, bytes, half, exec)
    }

    #[allow(clippy::too_many_arguments)]
    fn store_at(
        &self,
        wave: &Wave,
        space: Space,
        places: &[u64; WAVE],
        data: u16,
        bytes: u8,
        half: Half,
        exec: u64,
    ) -> Result<(), String> {
        let data = usize::from(data);
        let bytes = usize::from(bytes);
        let mut segment = Segment::EMPTY;
        for lane in active(exec) {
            let place =
                self.writable(&mut segment, space, places[lane], bytes).map_err(|problem| format!("lane {lane}: {problem}"))?;
            let value = wave.vectors[data][lane];
            let value = if half == Half::High { value >> 16 } else { value };
            let value = if self.corrupt && space != Space::Lds { corrupted(value, bytes) } else { value };
            // SAFETY: `writable` has checked that all `bytes` lie in live memory.
            unsafe {
                match bytes {
                    1 => *place = value as u8,
                    2 => place.cast::<u16>().write_unaligned(value as u16),
                    _ => {
                        place.cast::<u32>().write_unaligned(value);
                        for word in 1..bytes / 4 {
                            place.add(4 * word).cast::<u32>().write_unaligned(wave.vectors[data + word][lane]);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    pub fn load_pair(&mut self, wave: &mut Wave, vector: u16, dst: u16, bytes: u8, offsets: [u32; 2]) -> Result<(), String> {
        let exec = wave.exec();
        // Both addresses are taken first: the first result may overwrite the address register.
        let places = offsets.map(|offset| {
            let address = Address { space: Space::Lds, vector, scalar: None, offset: i64::from(offset) };
            addresses(wave, &address)
        });
        for (index, places) in places.iter().enumerate() {
            self.count_read(Space::Lds, exec, bytes);
            let dst = dst + index as u16 * u16::from(bytes) / 4;
            self.load_at(wave, Space::Lds, places, dst, bytes, false, Half::Whole, exec)?;
        }
        Ok(())
    }

    pub fn store_pair(&mut self, wave: &Wave, vector: u16, data: [u16; 2], bytes: u8, offsets: [u32; 2]) -> Result<(), String> {
        for (data, offset) in data.into_iter().zip(offsets) {
            let address = Address { space: Space::Lds, vector, scalar: None, offset: i64::from(offset) };
            self.store(wave, &address, data, bytes, Half::Whole)?;
        }
        Ok(())
    }

    /// `s_load_dword*`: dwords at a scalar address; its lowest two bits are ignored.
    pub fn load_scalar(
        &mut self,
        wave: &mut Wave,
        dwords: u8,
        dst: u8,
        base: u8,
        index: Option<u8>,
        offset: i64,
    ) -> Result<(), String> {
        let index = index.map_or(0, |register| u64::from(wave.scalars[usize::from(register)]));
        let address = wave.read64(base).wrapping_add(index).wrapping_add_signed(offset) & !3;
        let mut segment = Segment::EMPTY;
        let bytes = 4 * usize::from(dwords);
        let place = match self.check_unwritten {
            // A wide load may take in neighbours of what the program uses; only those used must have been written, which
            // is not known here. Bounds are still checked.
            true if dwords > 1 => {
                segment = self.locate(Space::Global, address, bytes)?;
                segment.place(address).cast_const()
            }
            _ => self.readable(&mut segment, Space::Global, address, bytes)?,
        };
        self.counts.bytes_read += bytes as u64;
        if let Some(details) = &mut self.details {
            details.caches.access(address, bytes as u64, false);
        }
        for word in 0..usize::from(dwords) {
            // SAFETY: all `bytes` were found in live memory just above.
            wave.scalars[usize::from(dst) + word] = unsafe { place.add(4 * word).cast::<u32>().read_unaligned() };
        }
        Ok(())
    }

    /// What an access asks of the caches, where they are watched.
    pub fn pass_caches(&mut self, space: Space, places: &[u64; WAVE], exec: u64, bytes: u8, write: bool) {
        let Some(details) = self.details.as_mut().filter(|_| space != Space::Lds) else { return };
        for lane in active(exec).filter(|lane| (places[*lane] >> 32) as u32 != SHARED_APERTURE) {
            details.caches.access(places[lane], u64::from(bytes), write);
        }
    }

    pub fn count_read(&mut self, space: Space, exec: u64, bytes: u8) {
        let total = u64::from(exec.count_ones()) * u64::from(bytes);
        if space == Space::Lds { self.counts.lds_bytes_read += total } else { self.counts.bytes_read += total }
    }

    pub fn count_write(&mut self, space: Space, exec: u64, bytes: u8) {
        let total = u64::from(exec.count_ones()) * u64::from(bytes);
        if space == Space::Lds { self.counts.lds_bytes_written += total } else { self.counts.bytes_written += total }
    }
}
