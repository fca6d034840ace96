//! Byte strings to numbers, in two arrays: no allocation a string.

use super::pages::Pages;

/// Spreads 128 bits over 64.
#[inline(always)]
pub fn mix(a: u64, b: u64) -> u64 {
    let product = (a ^ 0x9e37_79b9_7f4a_7c15) as u128 * (b ^ 0xd6e8_feb8_6659_fd93) as u128;
    product as u64 ^ (product >> 64) as u64
}

/// Of a byte string.
pub fn hash(bytes: &[u8]) -> u64 {
    let (chunks, rest) = bytes.as_chunks::<8>();
    let mut hash = bytes.len() as u64;
    for chunk in chunks {
        hash = mix(hash, u64::from_le_bytes(*chunk));
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    mix(hash, u64::from_le_bytes(last))
}

/// [`hash`] for the standard library's maps, of texts that nobody chose to collide.
#[derive(Default)]
pub struct TextHasher(u64);

impl std::hash::Hasher for TextHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = mix(self.0, hash(bytes));
    }

    fn write_u8(&mut self, end: u8) {
        self.0 = mix(self.0, end.into());
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Slot {
    /// High half of the hash.
    tag: u32,
    /// Length + 1; 0 where the slot is free.
    size: u32,
    offset: u32,
    value: u32,
}

/// Bytes are compared whenever a hash matches: two strings are never taken for one another.
pub struct ByteMap {
    slots: Pages<Slot>,
    bytes: Vec<u8>,
    used: usize,
}

impl Default for ByteMap {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: four numbers without gaps; all zeros are a free slot.
unsafe impl bytemuck::Zeroable for Slot {}

impl ByteMap {
    pub fn new() -> Self {
        Self { slots: Pages::zeroed(1 << 10), bytes: Vec::new(), used: 0 }
    }

    /// Bytes of all keys together.
    pub fn key_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Whether [`ByteMap::insert`] may add `key`.
    pub fn has_room(&self, key: &[u8]) -> bool {
        self.bytes.len() + key.len() < u32::MAX as usize
    }

    /// All keys with their values.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], u32)> {
        self.slots.iter().filter(|slot| slot.size != 0).map(|slot| (self.key(*slot), slot.value))
    }

    pub fn get(&self, key: &[u8]) -> Option<u32> {
        let hash = hash(key);
        let mask = self.slots.len() - 1;
        let mut i = hash as usize & mask;
        loop {
            let slot = self.slots[i];
            if slot.size == 0 {
                return None;
            }
            if slot.tag == (hash >> 32) as u32 && self.key(slot) == key {
                return Some(slot.value);
            }
            i = (i + 1) & mask;
        }
    }

    fn key(&self, slot: Slot) -> &[u8] {
        &self.bytes[slot.offset as usize..][..slot.size as usize - 1]
    }

    /// Adds a key that is not there yet. All keys together must stay below 4 GiB.
    pub fn insert(&mut self, key: &[u8], value: u32) {
        if self.used * 2 >= self.slots.len() {
            let larger = Pages::zeroed(self.slots.len() * 2);
            for slot in std::mem::replace(&mut self.slots, larger).iter() {
                if slot.size != 0 {
                    let hash = hash(self.key(*slot));
                    self.place(hash, *slot);
                }
            }
        }
        let hash = hash(key);
        let slot = Slot { tag: (hash >> 32) as u32, size: key.len() as u32 + 1, offset: self.bytes.len() as u32, value };
        self.bytes.extend_from_slice(key);
        self.place(hash, slot);
        self.used += 1;
    }

    fn place(&mut self, hash: u64, slot: Slot) {
        let mask = self.slots.len() - 1;
        let mut i = hash as usize & mask;
        while self.slots[i].size != 0 {
            i = (i + 1) & mask;
        }
        self.slots[i] = slot;
    }
}
