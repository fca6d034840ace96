//! Documents made to trip tokenizers up.

/// A small generator with a good spread: splitmix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn of<'a, T: ?Sized>(&mut self, list: &[&'a T]) -> &'a T {
        list[self.below(list.len())]
    }

    fn char_of(&mut self, set: &str) -> char {
        let count = set.chars().count();
        set.chars().nth(self.below(count)).unwrap_or('x')
    }

    fn char_within(&mut self, first: u32, last: u32) -> char {
        char::from_u32(first + self.below((last - first + 1) as usize) as u32).unwrap_or('\u{fffd}')
    }
}

/// All of White_Space, and some that only look like it.
const SPACES: &str = " \t\n\u{b}\u{c}\r\u{85}\u{a0}\u{1680}\u{2000}\u{2001}\u{2002}\u{2003}\u{2004}\u{2005}\u{2006}\u{2007}\u{2008}\u{2009}\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{200b}\u{180e}\u{feff}\u{1c}\u{1f}";
const PUNCTUATION: &str = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~«»“”‘’…—–·•°€£¥©®±×÷§¶†‡、。「」！？・〜゛";
const WORDS: [&str; 24] = [
    "the",
    "The",
    "THE",
    "and",
    "word",
    "don't",
    "It's",
    "we'LL",
    "HTMLParser",
    "camelCase",
    "snake_case",
    "naïve",
    "Straße",
    "été",
    "größer",
    "слово",
    "Привет",
    "λόγος",
    "中文",
    "日本語",
    "テスト",
    "한국어",
    "हिन्दी",
    "ไทย",
];
const CONTRACTIONS: [&str; 16] =
    ["'s", "'S", "'t", "'re", "'RE", "'ve", "'Ve", "'m", "'ll", "'lL", "'d", "'\u{17f}", "'\u{212a}", "''s", "'l", "'r"];
const ODD: [&str; 30] = [
    "\0",
    "\u{feff}",
    "\u{7f}",
    "\u{1}",
    "e\u{301}",
    "a\u{327}\u{301}",
    "\u{301}",
    "\u{489}",
    "\u{1161}\u{11a8}",
    "\u{1112}\u{1161}\u{11ab}",
    "\u{212b}",
    "ﬁ",
    "ǅ",
    "ʰ",
    "ª",
    "º",
    "²",
    "½",
    "Ⅷ",
    "٣",
    "४",
    "๙",
    "𝟗",
    "\u{1fae8}",
    "\u{16d40}",
    "\u{1e5d0}",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "▁",
    "▁▁",
];
const MARKUP: [&str; 18] = [
    "<div>",
    "</p>",
    "<br/>",
    "<|im_start|>",
    "<|endoftext|>",
    "<bos>",
    "<unused7>",
    "<think>",
    "</think>",
    "<start_of_turn>",
    "[multimodal]",
    "\n\n\n",
    "\t\t",
    "<",
    "> ",
    ">\u{2581}</",
    "<｜User｜>",
    "//\n/",
];

/// One document; `added` are texts of added tokens to strew in.
pub fn document(random: &mut Random, added: &[String]) -> String {
    let mut text = String::new();
    let parts = match random.below(8) {
        0 => random.below(3),
        1 => 1 + random.below(120),
        _ => 1 + random.below(24),
    };
    for _ in 0..parts {
        part(random, added, &mut text);
    }
    text
}

fn part(random: &mut Random, added: &[String], text: &mut String) {
    match random.below(20) {
        0 | 1 => {
            for _ in 0..1 + random.below(3) {
                text.push(random.char_of(SPACES));
            }
        }
        2..=5 => {
            text.push_str(random.of(&[" ", " ", " ", "", "\n", "  ", "\t"]));
            text.push_str(random.of(&WORDS));
        }
        6 => text.push_str(random.of(&CONTRACTIONS)),
        7 => text.push_str(random.of(&ODD)),
        8 => text.push_str(random.of(&MARKUP)),
        9 => (0..1 + random.below(4)).for_each(|_| text.push(random.char_of(PUNCTUATION))),
        10 => (0..1 + random.below(9)).for_each(|_| text.push(random.char_within('0' as u32, '9' as u32))),
        11 => (0..1 + random.below(12)).for_each(|_| text.push(random.char_within(0x20, 0x7e))),
        12 => (0..1 + random.below(12)).for_each(|_| text.push(random.char_within('A' as u32, 'z' as u32))),
        13 => (0..1 + random.below(8)).for_each(|_| text.push(random.char_within(0, 0x24f))),
        14 => {
            let (first, last) =
                [(0x300, 0x6ff), (0x900, 0xfff), (0x1e00, 0x2fff), (0x3000, 0x9fff), (0xac00, 0xd7a3), (0x10000, 0x1ffff)]
                    [random.below(6)];
            (0..1 + random.below(12)).for_each(|_| text.push(random.char_within(first, last)));
        }
        15 => text.push(random.char_within(0, char::MAX as u32)),
        16 => {
            let bytes: Vec<u8> = (0..1 + random.below(24)).map(|_| random.next() as u8).collect();
            text.push_str(&String::from_utf8_lossy(&bytes));
        }
        17 if random.below(6) == 0 => {
            let count = random.of(&[&31, &32, &33, &63, &64, &65, &127, &128, &256, &1000]);
            let c = random.char_of(" \n\t\ra0'-=*A中é👍\u{301}▁/");
            (0..*count).for_each(|_| text.push(c));
        }
        17 => text.push_str(random.of(&["/", "\n/", "\r\n", " (", "('s", "\"'S ", " 12", "  1", "x1", "1x", " \n x", "\n  \n"])),
        18 if !added.is_empty() => text.push_str(&added[random.below(added.len())]),
        18 => text.push_str(random.of(&MARKUP)),
        _ => {
            for _ in 0..1 + random.below(30) {
                text.push(random.char_within('a' as u32, 'z' as u32));
            }
        }
    }
}
