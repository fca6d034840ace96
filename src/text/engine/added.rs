//! Finding added tokens in text: the leftmost first, of those that start at one place the longest.

use super::padded::Padded;
#[cfg(target_arch = "x86_64")]
use super::simd::Avx2;
use super::simd::{ByteSet, Level, Portable, Wide};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Match {
    pub start: usize,
    pub end: usize,
    pub id: u32,
}

#[derive(Clone, Copy, Default)]
struct Node {
    /// Children lie together, by rising byte.
    first_child: u32,
    children: u16,
    byte: u8,
    token: Option<Token>,
}

#[derive(Clone, Copy)]
enum Token {
    Take(u32),
    /// A special token: its text stays text, but no other added token is found inside.
    Leave,
}

/// A trie of added tokens.
pub struct Matcher {
    nodes: Vec<Node>,
    /// Nodes of first bytes.
    root: [u32; 256],
    /// Bytes that tokens begin with, and those that come second.
    first: ByteSet,
    second: ByteSet,
}

impl Matcher {
    /// Of (text, id); id `None` for tokens that are to stay text. `None` if there is nothing to find.
    pub fn new(tokens: &[(&str, Option<u32>)]) -> Option<Self> {
        tokens.iter().find(|(_, id)| id.is_some())?;
        let mut sorted: Vec<(&[u8], Token)> =
            tokens.iter().map(|(text, id)| (text.as_bytes(), id.map_or(Token::Leave, Token::Take))).collect();
        sorted.sort_by(|a, b| a.0.cmp(b.0));
        let first: Vec<u8> = sorted.iter().map(|(text, _)| text[0]).collect();
        // Anything may follow a token of one byte.
        let alone = sorted.iter().any(|(text, _)| text.len() == 1);
        let second: Vec<u8> = if alone { (0..=255).collect() } else { sorted.iter().map(|(text, _)| text[1]).collect() };
        let mut matcher =
            Self { nodes: vec![Node::default()], root: [0; 256], first: ByteSet::new(&first), second: ByteSet::new(&second) };
        matcher.build(0, 0, &sorted);
        let top = matcher.nodes[0];
        for index in top.first_child..top.first_child + top.children as u32 {
            let byte = matcher.nodes[index as usize].byte;
            matcher.root[byte as usize] = index;
        }
        Some(matcher)
    }

    /// Adds below `node` the tokens, which have their first `depth` bytes in common and rise.
    fn build(&mut self, node: usize, depth: usize, mut tokens: &[(&[u8], Token)]) {
        while let Some((text, token)) = tokens.first()
            && text.len() == depth
        {
            self.nodes[node].token = Some(*token);
            tokens = &tokens[1..];
        }
        let groups: Vec<_> = tokens.chunk_by(|a, b| a.0[depth] == b.0[depth]).collect();
        let first = self.nodes.len();
        self.nodes[node].first_child = first as u32;
        self.nodes[node].children = groups.len() as u16;
        self.nodes.extend(groups.iter().map(|group| Node { byte: group[0].0[depth], ..Node::default() }));
        for (i, group) in groups.into_iter().enumerate() {
            self.build(first + i, depth + 1, group);
        }
    }

    /// The token that starts at `at`, the longest.
    fn longest(&self, text: &[u8], at: usize) -> Option<(usize, Token)> {
        let mut found = None;
        let (mut node, mut end) = (self.root[text[at] as usize], at + 1);
        while node != 0 {
            let here = self.nodes[node as usize];
            if let Some(token) = here.token {
                found = Some((end, token));
            }
            let Some(byte) = text.get(end) else { break };
            let children = &self.nodes[here.first_child as usize..][..here.children as usize];
            node = children.iter().position(|c| c.byte == *byte).map_or(0, |i| here.first_child + i as u32);
            end += 1;
        }
        found
    }

    /// The first token to take at or after `from`.
    pub fn next(&self, level: Level, text: Padded<'_>, from: usize) -> Option<Match> {
        let bytes = &text.bytes()[..text.len()];
        let mut at = from;
        while at < bytes.len() {
            at = self.candidate(level, text, at);
            if at >= bytes.len() {
                break;
            }
            match self.longest(bytes, at) {
                Some((end, Token::Take(id))) => return Some(Match { start: at, end, id }),
                Some((end, Token::Leave)) => at = end,
                None => at += 1,
            }
        }
        None
    }

    /// The next place where a token may start; the length of the text, or more, if there is none.
    #[inline(always)]
    fn candidate(&self, level: Level, text: Padded<'_>, at: usize) -> usize {
        match level {
            Level::Portable => self.find::<Portable>(text, at),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Level::detect` found what the function is compiled for.
            Level::Avx2 | Level::Avx512 => unsafe { self.find_avx2(text, at) },
        }
    }

    #[inline(always)]
    fn find<W: Wide>(&self, text: Padded<'_>, mut at: usize) -> usize {
        while at < text.len() {
            let found = W::within(text.block(at), &self.first) & W::within(text.block(at + 1), &self.second);
            if found != 0 {
                return at + found.trailing_zeros() as usize;
            }
            at += 64;
        }
        at
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn find_avx2(&self, text: Padded<'_>, at: usize) -> usize {
        self.find::<Avx2>(text, at)
    }
}

#[cfg(test)]
mod tests {
    use super::super::padded::Buffer;
    use super::*;

    fn find(tokens: &[(&str, Option<u32>)], text: &str) -> Vec<(usize, usize, u32)> {
        let matcher = Matcher::new(tokens).unwrap();
        let mut buffer = Buffer::default();
        buffer.set(text);
        let (mut at, mut found) = (0, Vec::new());
        while let Some(m) = matcher.next(Level::detect(), buffer.text(), at) {
            found.push((m.start, m.end, m.id));
            at = m.end;
        }
        found
    }

    #[test]
    fn the_leftmost_and_then_the_longest_is_found_and_special_tokens_hide_what_is_inside() {
        let tokens = [("\n", Some(1)), ("\n\n", Some(2)), ("<a>", Some(3)), ("a>b", Some(4)), ("<s><a", None), ("é", Some(5))];
        assert_eq!(find(&tokens, "x\n\n\ny"), [(1, 3, 2), (3, 4, 1)]);
        assert_eq!(find(&tokens, "<a>b"), [(0, 3, 3)]);
        assert_eq!(find(&tokens, "<s><a>b<a"), []);
        assert_eq!(find(&tokens, "<s>a>bé"), [(3, 6, 4), (6, 8, 5)]);
        assert!(Matcher::new(&[("<s>", None)]).is_none());
    }
}
