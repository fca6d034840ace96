//! Cutting text for vocabularies without a pre-tokenizer (Gemma): spaces count as `▁`, and a piece ends where no token that the
//! merges make holds the two characters to both sides, as nothing is ever merged across.

use std::collections::{HashMap, HashSet};

use super::batch::Batch;
use super::bytemap::mix;
use super::padded::Padded;
use super::runs::Runs;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Level, Portable, Wide};
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

/// What is known of the boundaries between two kinds of ASCII characters.
#[derive(Clone, Copy, PartialEq)]
enum Verdict {
    Cut,
    Held,
    /// Each pair has to be looked up.
    Ask,
}

/// Kinds of ASCII characters: small letters, capitals, digits, the space, all others.
const KINDS: usize = 5;

fn kind(byte: u8) -> usize {
    match byte {
        b'a'..=b'z' => 0,
        b'A'..=b'Z' => 1,
        b'0'..=b'9' => 2,
        b' ' => 3,
        _ => 4,
    }
}

pub struct Sentence {
    /// For two ASCII characters (first * 128 + second): [`CUT`] between them, or [`LOOK`] closer, or neither.
    ascii: Box<[u8; 128 * 128]>,
    /// For the second kind and the first: all bits where they are cut, or where each pair is looked up.
    cuts: [[u64; KINDS]; KINDS],
    asks: [[u64; KINDS]; KINDS],
    /// `asks` are not all zero.
    any_asks: bool,
    /// First characters of the pairs to look at closer, where a table of kinds says [`Verdict::Cut`].
    looks: Vec<u8>,
    /// All pairs that some token holds.
    pairs: PairSet,
    rare: HashMap<u64, Vec<Across>>,
    /// Characters that are cut from all others, and never from each other.
    runs: Vec<u8>,
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

/// Not to cut is always right: where less than half of the pairs of two kinds could be cut, none is. (Those are the pairs that texts
/// have few of; to look each pair up would take longer than their longer pieces do.)
fn verdict(ascii: &[u8; 128 * 128], left: usize, right: usize) -> Verdict {
    let (mut cuts, mut looks, mut all, mut certain) = (0, 0, 0, true);
    for (pair, entry) in ascii.iter().enumerate() {
        let two = [(pair >> 7) as u8, pair as u8 & 127];
        if kind(two[0]) == left && kind(two[1]) == right {
            certain &= *entry != 0;
            // Control characters stand in no token and hardly in a text.
            if !two.iter().any(u8::is_ascii_control) {
                all += 1;
                cuts += usize::from(*entry == CUT);
            }
            looks += usize::from(*entry == LOOK);
        }
    }
    if certain && looks <= RARE {
        Verdict::Cut
    } else if looks == 0 && cuts * 2 <= all {
        Verdict::Held
    } else {
        Verdict::Ask
    }
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
        let (mut cuts, mut asks, mut looks) = ([[0; KINDS]; KINDS], [[0; KINDS]; KINDS], Vec::new());
        for (left, right) in (0..KINDS * KINDS).map(|i| (i / KINDS, i % KINDS)) {
            match verdict(&ascii, left, right) {
                Verdict::Cut => cuts[right][left] = !0,
                Verdict::Held => {}
                Verdict::Ask => asks[right][left] = !0,
            }
        }
        for (pair, _) in ascii.iter().enumerate().filter(|(_, entry)| **entry == LOOK) {
            let (left, right) = ((pair >> 7) as u8, pair as u8 & 127);
            if cuts[kind(right)][kind(left)] != 0 && !looks.contains(&left) {
                looks.push(left);
            }
        }
        let any_asks = asks.as_flattened().iter().any(|mask| *mask != 0);
        Self { ascii, cuts, asks, any_asks, looks, pairs: PairSet::new(&pairs), rare, runs: Vec::new() }
    }

    /// From now on these characters, of which no text comes to the merges, are cut from all others and not from each other.
    pub fn set_runs(&mut self, runs: &Runs) {
        self.runs = runs.bytes().collect();
    }

    /// Whether no token holds `left` with a space behind it; false where that would take a closer look.
    pub fn parts_before_space(&self, left: char) -> bool {
        left.is_ascii() && (self.ascii[left as usize * 128 + ' ' as usize] == CUT || self.is_run(left as u32))
    }

    /// Cuts pieces from `at` on into `batch` until the text ends or the batch is nearly full. Returns how far it came.
    pub fn fill(&self, level: Level, text: Padded<'_>, at: usize, batch: &mut Batch) -> usize {
        match level {
            Level::Portable => self.fill_blocks::<Portable>(text, at, batch),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Level::detect` found what the function is compiled for.
            Level::Avx2 => unsafe { self.fill_avx2(text, at, batch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Level::Avx512 => unsafe { self.fill_avx512(text, at, batch) },
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn fill_avx2(&self, text: Padded<'_>, at: usize, batch: &mut Batch) -> usize {
        self.fill_blocks::<Avx2>(text, at, batch)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn fill_avx512(&self, text: Padded<'_>, at: usize, batch: &mut Batch) -> usize {
        self.fill_blocks::<Avx512>(text, at, batch)
    }

    #[inline(always)]
    fn fill_blocks<W: Wide>(&self, text: Padded<'_>, mut at: usize, batch: &mut Batch) -> usize {
        let start = at;
        while at < text.len() && batch.room() >= 64 {
            // Where the first character, or the one behind a space, is not ASCII, a block tells nothing.
            let [first, second] = [text.bytes()[at], text.bytes()[at + 1]];
            let ends = if (first | second) < 0x80 { self.ends::<W>(text, start, at) } else { 0 };
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
    fn ends<W: Wide>(&self, text: Padded<'_>, start: usize, at: usize) -> u64 {
        let block = text.block(at);
        let masks = W::ascii(block);
        let left = (text.len() - at).min(64);
        let known = (masks.high.trailing_zeros() as usize).min(left);
        let certain = if known == 64 { !1 } else { ((1u64 << known) - 1) & !1 };
        // A run is of no kind.
        let (mut runs, mut borders) = (0, 0);
        for byte in &self.runs {
            let run = W::equal(block, *byte);
            runs |= run;
            borders |= run ^ run << 1;
        }
        let kinds = [
            masks.letter & !(masks.upper | runs),
            masks.upper & !runs,
            masks.digit & !runs,
            masks.space,
            !(masks.letter | masks.digit | masks.space | masks.high | runs),
        ];
        // Places whose character is of some kind while the one before is of a kind that `table` names for it.
        let behind = |table: &[[u64; KINDS]; KINDS]| {
            table
                .iter()
                .zip(kinds)
                .fold(0, |all, (row, right)| all | right & row.iter().zip(kinds).fold(0, |any, (on, left)| any | left & on) << 1)
        };
        let mut cuts = behind(&self.cuts) | borders;
        let mut asks = if self.any_asks { behind(&self.asks) } else { 0 };
        for left in &self.looks {
            asks |= W::equal(block, *left) << 1 & masks.space;
        }
        asks &= certain & !borders;
        cuts &= certain & !asks;
        while asks != 0 {
            let i = asks.trailing_zeros() as usize;
            asks &= asks - 1;
            let [left, right] = [block[i - 1], block[i]];
            let cut = match self.ascii[(left & 127) as usize * 128 + (right & 127) as usize] {
                LOOK => !self.is_held(text, start, at + i, pair(left as u32, right as u32)),
                entry => entry == CUT,
            };
            cuts |= (cut as u64) << i;
        }
        cuts
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
            let held = if self.is_run(left) || self.is_run(right) {
                left == right
            } else {
                self.pairs.contains(two) && (right != ' ' as u32 || self.is_held(text, start, end, two))
            };
            if !held {
                break;
            }
            (left, end) = (right, end + length);
        }
        end
    }

    #[inline(always)]
    fn is_run(&self, code: u32) -> bool {
        self.runs.iter().any(|byte| *byte as u32 == code)
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

/// Pairs of code points, one bit each: a pair may share the bit of another, and is then taken to be held too, which costs a cut and
/// nothing else. So small, it stays in the second-level cache.
struct PairSet {
    bits: Vec<u64>,
}

const PAIRS_LOG2: u32 = 20;

impl PairSet {
    fn new(pairs: &HashSet<u64>) -> Self {
        let mut set = Self { bits: vec![0; 1 << (PAIRS_LOG2 - 6)] };
        for pair in pairs {
            let bit = Self::bit(*pair);
            set.bits[bit >> 6] |= 1 << (bit & 63);
        }
        set
    }

    fn bit(pair: u64) -> usize {
        (mix(pair, 0) >> (64 - PAIRS_LOG2)) as usize
    }

    #[inline(always)]
    fn contains(&self, pair: u64) -> bool {
        let bit = Self::bit(pair);
        self.bits[bit >> 6] >> (bit & 63) & 1 == 1
    }
}
