//! Cutting text for vocabularies without a pre-tokenizer (Gemma): spaces count as `▁`, and a piece ends where no token that the
//! merges make holds the two characters to both sides, as nothing is ever merged across.

use std::collections::{HashMap, HashSet};

use super::batch::Batch;
use super::bytemap::mix;
use super::padded::Padded;
use super::simd::Level;
use super::unicode::decode;

/// What stands for a space in the vocabulary.
pub const SPACE_MARK: char = '\u{2581}';

/// Pairs that so few tokens hold are looked at in their context.
const RARE: usize = 4;

const CUT: u8 = 1;
const LOOK: u8 = 2;

/// A token across a rare pair, and where in it the pair's second character stands.
struct Across {
    token: Vec<u32>,
    second: usize,
}

pub struct Sentence {
    /// For two ASCII characters (first * 128 + second): [`CUT`] between them, or [`LOOK`] closer, or neither.
    ascii: Box<[u8; 128 * 128]>,
    /// All pairs that some token holds.
    pairs: PairSet,
    rare: HashMap<u64, Vec<Across>>,
}

/// A space and its mark are one character.
#[inline(always)]
fn fold(code: u32) -> u32 {
    if code == SPACE_MARK as u32 { ' ' as u32 } else { code }
}

#[inline(always)]
fn pair(left: u32, right: u32) -> u64 {
    (left as u64) << 32 | right as u64
}

impl Sentence {
    /// `tokens` are the texts of what the merges make.
    pub fn new<'a>(tokens: impl Iterator<Item = &'a str>) -> Self {
        let mut holders: HashMap<u64, Vec<Across>> = HashMap::new();
        let mut pairs = HashSet::new();
        for token in tokens {
            let token: Vec<u32> = token.chars().map(|c| fold(c as u32)).collect();
            for (i, two) in token.windows(2).enumerate() {
                pairs.insert(pair(two[0], two[1]));
                // Most tokens with an inner space hold nothing but spaces; between others, a cut before a space is what keeps
                // pieces as short as words.
                if two[1] == ' ' as u32 && two[0] != ' ' as u32 {
                    let list = holders.entry(pair(two[0], two[1])).or_default();
                    if list.len() <= RARE {
                        list.push(Across { token: token.clone(), second: i + 1 });
                    }
                }
            }
        }
        let rare: HashMap<_, _> = holders.into_iter().filter(|(_, list)| list.len() <= RARE).collect();
        let mut ascii = Box::new([CUT; 128 * 128]);
        for known in &pairs {
            let (left, right) = ((known >> 32) as usize, *known as u32 as usize);
            if left < 128 && right < 128 {
                ascii[left * 128 + right] = if rare.contains_key(known) { LOOK } else { 0 };
            }
        }
        Self { ascii, pairs: PairSet::new(&pairs), rare }
    }

    /// Cuts pieces from `at` on into `batch` until the text ends or the batch is nearly full. Returns how far it came.
    pub fn fill(&self, level: Level, text: Padded<'_>, at: usize, batch: &mut Batch) -> usize {
        match level {
            Level::Portable => self.fill_blocks(text, at, batch),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Level::detect` found what the function is compiled for.
            Level::Avx2 | Level::Avx512 => unsafe { self.fill_avx2(text, at, batch) },
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn fill_avx2(&self, text: Padded<'_>, at: usize, batch: &mut Batch) -> usize {
        self.fill_blocks(text, at, batch)
    }

    #[inline(always)]
    fn fill_blocks(&self, text: Padded<'_>, mut at: usize, batch: &mut Batch) -> usize {
        let start = at;
        while at < text.len() && batch.room() >= 64 {
            let ends = self.ends(text, start, at);
            if ends != 0 {
                at = batch.push_ends(at, ends);
            } else {
                let end = self.next(text, start, at);
                batch.push(at, end - at);
                at = end;
            }
        }
        at
    }

    /// Bit i: a piece starts at `at + i`; of ASCII characters only.
    #[inline(always)]
    fn ends(&self, text: Padded<'_>, start: usize, at: usize) -> u64 {
        let block = text.block(at);
        let left = (text.len() - at).min(64);
        let high = block.iter().enumerate().fold(0u64, |mask, (i, byte)| mask | ((byte >> 7) as u64) << i);
        let known = (high.trailing_zeros() as usize).min(left);
        let (mut cuts, mut looks) = (0u64, 0u64);
        for i in 1..64 {
            let entry = self.ascii[(block[i - 1] & 127) as usize * 128 + (block[i] & 127) as usize];
            cuts |= ((entry & CUT) as u64) << i;
            looks |= ((entry / LOOK) as u64) << i;
        }
        let certain = if known == 64 { !0 } else { (1u64 << known) - 1 };
        looks &= certain;
        while looks != 0 {
            let i = looks.trailing_zeros() as usize;
            looks &= looks - 1;
            let two = pair(block[i - 1] as u32, block[i] as u32);
            cuts |= (!self.is_held(text, start, at + i, two) as u64) << i;
        }
        cuts & certain
    }

    /// End of the piece at `at`, character by character.
    fn next(&self, text: Padded<'_>, start: usize, at: usize) -> usize {
        let bytes = text.bytes();
        let (code, length) = decode(bytes, at);
        let (mut left, mut end) = (fold(code), at + length);
        while end < text.len() {
            let (code, length) = decode(bytes, end);
            let right = fold(code);
            let two = pair(left, right);
            let held = self.pairs.contains(two) && (right != ' ' as u32 || self.is_held(text, start, end, two));
            if !held {
                break;
            }
            (left, end) = (right, end + length);
        }
        end
    }

    /// Some token that holds the rare pair `two` stands in the text with the pair's second character at `at`.
    #[cold]
    fn is_held(&self, text: Padded<'_>, start: usize, at: usize, two: u64) -> bool {
        let part = |from: usize, to: usize| std::str::from_utf8(&text.bytes()[from..to]).unwrap_or_default();
        let holds = |across: &Across| {
            let longest = across.token.len() * 4;
            let mut from = at.saturating_sub(longest).max(start);
            while from < at && text.bytes()[from] & 0xc0 == 0x80 {
                from += 1;
            }
            let mut to = (at + longest).min(text.len());
            while to < text.len() && text.bytes()[to] & 0xc0 == 0x80 {
                to += 1;
            }
            let (before, behind) = across.token.split_at(across.second);
            let codes = |c: char| fold(c as u32);
            part(from, at).chars().rev().map(codes).take(before.len()).eq(before.iter().rev().copied())
                && part(at, to).chars().map(codes).take(behind.len()).eq(behind.iter().copied())
        };
        self.rare.get(&two).is_none_or(|list| list.iter().any(holds))
    }
}

/// Pairs of code points.
struct PairSet {
    /// 0 where free: no token holds two NULs beside each other, or if one does, the pair is taken to be held always.
    slots: Vec<u64>,
}

impl PairSet {
    fn new(pairs: &HashSet<u64>) -> Self {
        let mut set = Self { slots: vec![0; (pairs.len() * 4).next_power_of_two().max(16)] };
        let mask = set.slots.len() - 1;
        for pair in pairs {
            let mut i = mix(*pair, 0) as usize & mask;
            while set.slots[i] != 0 {
                i = (i + 1) & mask;
            }
            set.slots[i] = *pair;
        }
        set
    }

    #[inline(always)]
    fn contains(&self, pair: u64) -> bool {
        let mask = self.slots.len() - 1;
        let mut i = mix(pair, 0) as usize & mask;
        loop {
            match self.slots[i] {
                found if found == pair => return true,
                0 => return false,
                _ => i = (i + 1) & mask,
            }
        }
    }
}
