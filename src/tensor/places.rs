//! Which stretches of an arena's memory are free. Knows addresses only, so it serves the host's memory and a device's alike.

use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub struct Places {
    /// Free stretches by address: address -> bytes.
    free: BTreeMap<usize, usize>,
    /// Bytes in use.
    used: usize,
}

impl Places {
    pub fn used(&self) -> usize {
        self.used
    }

    /// Whether one stretch has room for `bytes`.
    pub fn has_room(&self, bytes: usize) -> bool {
        self.free.values().any(|free| *free >= bytes)
    }

    /// Number of free stretches.
    #[cfg(test)]
    pub fn stretches(&self) -> usize {
        self.free.len()
    }

    /// Adds memory that was never given out.
    pub fn add(&mut self, address: usize, bytes: usize) {
        self.free.insert(address, bytes);
    }

    /// The smallest free stretch that holds `bytes`, the first of equals: the same places for the same order of calls.
    pub fn take(&mut self, bytes: usize) -> Option<usize> {
        let (address, len) =
            self.free.iter().filter(|(_, len)| **len >= bytes).min_by_key(|(_, len)| **len).map(|(a, l)| (*a, *l))?;
        self.free.remove(&address);
        if len > bytes {
            self.free.insert(address + bytes, len - bytes);
        }
        self.used += bytes;
        Some(address)
    }

    /// Takes back what `take` gave; neighbours grow together.
    pub fn give_back(&mut self, address: usize, bytes: usize) {
        self.used -= bytes;
        let (mut address, mut bytes) = (address, bytes);
        if let Some(after) = self.free.remove(&(address + bytes)) {
            bytes += after;
        }
        if let Some((before, len)) = self.free.range(..address).next_back().map(|(a, l)| (*a, *l))
            && before + len == address
        {
            self.free.remove(&before);
            (address, bytes) = (before, len + bytes);
        }
        self.free.insert(address, bytes);
    }
}
