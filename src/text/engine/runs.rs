//! Added tokens that are one character again and again, as Gemma's newlines and tabs are.
//!
//! Where there is one for every number up to some number, and no other added token holds the character, it never reaches the
//! merges, and its tokens follow from the length of a run alone. So a run is a piece as others are, which the cache of words
//! knows: finding such tokens first would break a text at the end of each line.

use std::borrow::Cow;

/// Tokens of the runs of one ASCII character.
struct Run {
    byte: u8,
    /// Of one character, of two, and so on.
    ids: Vec<u32>,
}

#[derive(Default)]
pub struct Runs {
    each: Vec<Run>,
}

/// An added token: its text, and its id if it is to be found.
pub type Added<'a> = (Cow<'a, str>, Option<u32>);

impl Runs {
    /// Takes what are runs out of the added tokens that are found in the text as it is.
    pub fn take_from(tokens: &mut Vec<Added<'_>>) -> Self {
        let mut runs = Self::default();
        for byte in 0..128u8 {
            // To the cutter a space and its mark are one character, to added tokens they are two: no runs of spaces.
            let mut holding: Vec<_> = tokens.iter().filter(|(text, _)| byte != b' ' && text.as_bytes().contains(&byte)).collect();
            holding.sort_by_key(|(text, _)| text.len());
            let is_run =
                |(i, (text, id)): (usize, &&Added<'_>)| id.filter(|_| text.len() == i + 1 && text.bytes().all(|b| b == byte));
            let ids: Option<Vec<u32>> = holding.iter().enumerate().map(is_run).collect();
            if let Some(ids) = ids.filter(|ids| !ids.is_empty()) {
                tokens.retain(|(text, _)| text.as_bytes()[0] != byte);
                runs.each.push(Run { byte, ids });
            }
        }
        runs
    }

    /// Their characters.
    pub fn bytes(&self) -> impl Iterator<Item = u8> {
        self.each.iter().map(|run| run.byte)
    }

    /// Appends the ids of `piece` if it is a run: the longest token again and again, and what is left. False if it is none.
    pub fn encode(&self, piece: &[u8], ids: &mut Vec<u32>) -> bool {
        let Some(run) = self.each.iter().find(|run| run.byte == piece[0]) else { return false };
        let longest = run.ids.len();
        ids.extend(std::iter::repeat_n(run.ids[longest - 1], piece.len() / longest));
        ids.extend((piece.len() % longest).checked_sub(1).map(|left| run.ids[left]));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_rows_of_tokens_are_runs() {
        let token = |text: &'static str, id: u32| (Cow::from(text), Some(id));
        let mut tokens = vec![
            token("\n\n", 12),
            token("\n", 11),
            token("\n\n\n", 13),
            // A gap, a character that another token holds, one whose token stays text, one that is not ASCII.
            token("--", 20),
            token("\t", 30),
            token("<\t>", 31),
            ("=".into(), None),
            token("é", 40),
            token(" ", 50),
        ];
        let runs = Runs::take_from(&mut tokens);
        assert_eq!(runs.bytes().collect::<Vec<_>>(), [b'\n']);
        assert_eq!(tokens.len(), 6);
        let mut ids = Vec::new();
        assert!(runs.encode(b"\n\n\n\n\n\n\n\n", &mut ids) && runs.encode(b"\n\n\n", &mut ids) && !runs.encode(b"a", &mut ids));
        assert_eq!(ids, [13, 13, 12, 13]);
    }
}
