//! Answer-preserving trimming: an example that is too long loses reasoning, and never a word of an answer.
//!
//! As the report on ZAYA1 describes it, to a budget of C tokens: (1) what fits stays as it is; (2) the tail of the last turn's
//! reasoning goes, its head and the whole answer stay; (3) where that is not enough, the reasoning of earlier turns goes too, tags
//! included, and then (2) as far as needed; (4) where the answers alone are longer than C, the example cannot be used.

use std::ops::Range;

use super::marks::{LAST, REASONING, TAG};

/// What stays of an example.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trimmed {
    Whole,
    /// These tokens, in order.
    Parts(Vec<Range<usize>>),
    /// It cannot be made short enough.
    TooLong,
}

/// Trims an example with these marks (one a token) to `budget` tokens.
pub fn trim(marks: &[u8], budget: usize) -> Trimmed {
    if marks.len() <= budget {
        return Trimmed::Whole;
    }
    let tail = |mark: u8| mark & REASONING != 0 && mark & LAST != 0;
    let earlier = |mark: u8| mark & (REASONING | TAG) != 0 && mark & LAST == 0;
    let removable = marks.iter().filter(|m| tail(**m)).count();
    let earlier_tokens = marks.iter().filter(|m| earlier(**m)).count();
    let excess = marks.len() - budget;
    let drop_earlier = excess > removable;
    let excess = if drop_earlier { excess.saturating_sub(earlier_tokens) } else { excess };
    if excess > removable {
        return Trimmed::TooLong;
    }
    // Of the last turn's reasoning the last tokens go.
    let head = removable - excess;
    let mut seen = 0;
    let mut parts: Vec<Range<usize>> = Vec::new();
    for (i, mark) in marks.iter().enumerate() {
        let stays = match () {
            () if tail(*mark) => {
                seen += 1;
                seen <= head
            }
            () if earlier(*mark) => !drop_earlier,
            () => true,
        };
        match parts.last_mut() {
            Some(last) if stays && last.end == i => last.end += 1,
            _ if stays => parts.push(i..i + 1),
            _ => {}
        }
    }
    Trimmed::Parts(parts)
}

/// Tokens that stay, and their marks.
pub fn apply<T: Copy>(parts: &[Range<usize>], tokens: &[T]) -> Vec<T> {
    parts.iter().flat_map(|part| &tokens[part.clone()]).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::super::marks::LEARN;
    use super::*;

    /// Marks from letters: p prompt, r reasoning, t tag, a answer; capitals for the last turn.
    fn marks(text: &str) -> Vec<u8> {
        let mark = |c: char| {
            let last = if c.is_uppercase() { LAST } else { 0 };
            last | match c.to_ascii_lowercase() {
                'r' => LEARN | REASONING,
                't' => LEARN | TAG,
                'a' => LEARN,
                _ => 0,
            }
        };
        text.chars().map(mark).collect()
    }

    fn trimmed(text: &str, budget: usize) -> Option<String> {
        let letters: Vec<char> = text.chars().collect();
        match trim(&marks(text), budget) {
            Trimmed::Whole => Some(text.into()),
            Trimmed::Parts(parts) => Some(apply(&parts, &letters).into_iter().collect()),
            Trimmed::TooLong => None,
        }
    }

    #[test]
    fn the_four_cases() {
        let one = "ppTRRRRTAA";
        assert_eq!(trimmed(one, 10).unwrap(), one);
        assert_eq!(trimmed(one, 9).unwrap(), "ppTRRRTAA");
        assert_eq!(trimmed(one, 6).unwrap(), "ppTTAA");
        assert_eq!(trimmed(one, 5), None);
        let two = "pptrrtaappTRRTA";
        // Enough in the last turn: earlier ones stay.
        assert_eq!(trimmed(two, 13).unwrap(), "pptrrtaappTTA");
        // Not enough: all earlier reasoning goes, and of the last turn only what must.
        assert_eq!(trimmed(two, 12).unwrap(), "ppaappTRRTA");
        assert_eq!(trimmed(two, 11).unwrap(), "ppaappTRRTA");
        assert_eq!(trimmed(two, 10).unwrap(), "ppaappTRTA");
        assert_eq!(trimmed(two, 9).unwrap(), "ppaappTTA");
        assert_eq!(trimmed(two, 8), None);
        assert_eq!(trimmed("ppaa", 3), None);
    }

    /// Against the rule, token by token, on many shapes.
    #[test]
    fn answers_survive_whatever_the_budget() {
        for case in 0..300u64 {
            let pick = |i: u64, n: u64| (case.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(i * 99_991) >> 33) % n;
            let mut text = String::new();
            let turns = 1 + pick(0, 3);
            for turn in 0..turns {
                text += &"p".repeat(1 + pick(turn * 7 + 1, 4) as usize);
                let mut own = String::new();
                if pick(turn * 7 + 2, 3) > 0 {
                    own += &format!("t{}t", "r".repeat(pick(turn * 7 + 3, 9) as usize));
                }
                own += &"a".repeat(1 + pick(turn * 7 + 4, 4) as usize);
                text += &if turn + 1 == turns { own.to_uppercase() } else { own };
            }
            let must: String = text.chars().filter(|c| "paAT".contains(*c)).collect();
            for budget in 0..=text.len() + 1 {
                match trimmed(&text, budget) {
                    Some(got) => {
                        assert!(got.len() <= budget);
                        assert_eq!(got.chars().filter(|c| "paAT".contains(*c)).collect::<String>(), must, "{text} to {budget}");
                        let full_last = text.matches('R').count();
                        if got.matches('r').count() == text.matches('r').count() && got.len() < text.len() {
                            assert_eq!(got.len(), budget, "only as much goes as must");
                        }
                        assert!(got.matches('R').count() <= full_last);
                    }
                    None => assert!(must.len() > budget, "{text} to {budget} was given up"),
                }
            }
        }
    }
}
