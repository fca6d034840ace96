//! What the model is to learn in a rendered conversation: its own turns, and the reasoning within them.

use std::ops::Range;

use super::conversation::Conversation;
use super::special::SpecialTokens;
use super::template::ChatTemplate;
use super::{END_GENERATION, GENERATION};

/// A conversation as text, with the assistant's turns in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    pub text: String,
    /// In order, apart from each other; none is empty.
    pub turns: Vec<Range<usize>>,
}

/// A block of reasoning, and the tags around it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    pub open: Range<usize>,
    pub inner: Range<usize>,
    /// With the white space that follows.
    pub close: Range<usize>,
}

/// Renders a conversation and finds the assistant's turns: what stands in `{% generation %}` blocks, if the template has them;
/// else what an assistant's message adds to the rendering of the messages before it (with the prompt for a turn of the assistant).
/// White space that follows the token which ends a turn is not part of it.
///
/// # Errors
/// A sentence when the template refuses the conversation, or when its parts do not render to parts of the whole.
pub fn render(template: &ChatTemplate, conversation: &Conversation, special: &SpecialTokens) -> Result<Rendered, String> {
    let whole = template.render(conversation, conversation.roles.len(), false)?;
    let mut out = if template.marks_generation() { marked(&whole)? } else { compared(template, conversation, whole)? };
    for turn in &mut out.turns {
        let text = &out.text[turn.clone()];
        let trimmed = text.trim_end();
        if special.ends(trimmed) {
            turn.end = turn.start + trimmed.len();
        }
    }
    out.turns.retain(|turn| !turn.is_empty());
    Ok(out)
}

/// Takes the marks of `{% generation %}` out.
fn marked(whole: &str) -> Result<Rendered, String> {
    let mut out = Rendered { text: String::with_capacity(whole.len()), turns: Vec::new() };
    let mut begun = None;
    for part in whole.split_inclusive([GENERATION, END_GENERATION]) {
        out.text.push_str(part.trim_end_matches([GENERATION, END_GENERATION]));
        match (part.chars().next_back(), begun) {
            (Some(GENERATION), None) => begun = Some(out.text.len()),
            (Some(END_GENERATION), Some(start)) => {
                out.turns.push(start..out.text.len());
                begun = None;
            }
            (Some(GENERATION | END_GENERATION), _) => {
                return Err("the template has a {% generation %} block within another".into());
            }
            _ => {}
        }
    }
    Ok(out)
}

fn compared(template: &ChatTemplate, conversation: &Conversation, whole: String) -> Result<Rendered, String> {
    let mut turns = Vec::new();
    for i in conversation.answers() {
        let differs = |what: &str| {
            format!(
                "message {} is an assistant's, but what is rendered {what} it is no beginning of the whole conversation's text; a template \
                 with {{% generation %}} blocks would say what is to be learnt",
                i + 1
            )
        };
        let before = template.render(conversation, i, false)?;
        let prompt = template.render(conversation, i, true)?;
        let end = match i + 1 == conversation.roles.len() {
            true => whole.len(),
            false => {
                let up_to = template.render(conversation, i + 1, false)?;
                if !whole.starts_with(&up_to) {
                    return Err(differs("up to"));
                }
                up_to.len()
            }
        };
        // A prompt may open a block of reasoning that the finished turn does not have: then as much of it counts as is there.
        let start = common_prefix(&prompt, &whole);
        if !whole.starts_with(&before) || start < before.len() {
            return Err(differs("before"));
        }
        if start < end {
            turns.push(start..end);
        }
    }
    Ok(Rendered { text: whole, turns })
}

/// Bytes that both begin with, whole characters.
fn common_prefix(a: &str, b: &str) -> usize {
    a.char_indices().zip(b.chars()).find(|((_, x), y)| x != y).map_or(a.len().min(b.len()), |((at, _), _)| at)
}

/// Blocks of reasoning in a turn: between an opening and a closing tag, either of which may be left out at the turn's beginning
/// (the prompt has opened the block). Blocks without an end are none.
pub fn blocks(text: &str, turn: &Range<usize>, [open, close]: &[String; 2]) -> Vec<Block> {
    let mut out = Vec::new();
    let mut at = turn.start;
    while let Some(ends) = text[at..turn.end].find(close.as_str()).map(|i| at + i) {
        let opening = text[at..ends].find(open.as_str()).map(|i| at + i..at + i + open.len());
        let before = text[..at].trim_end();
        let opening = match opening {
            Some(opening) => opening,
            None if at == turn.start && before.ends_with(open.as_str()) => before.len() - open.len()..before.len(),
            None if at == turn.start => at..at,
            None => break,
        };
        let after = ends + close.len();
        let rest = &text[after..turn.end];
        let end = after + rest.len() - rest.trim_start().len();
        out.push(Block { inner: opening.end..ends, open: opening, close: ends..end });
        at = end;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tags() -> [String; 2] {
        ["<think>", "</think>"].map(String::from)
    }

    #[test]
    fn blocks_are_found_with_and_without_their_opening_tag() {
        let shown = |text: &str, turn: Range<usize>| -> Vec<[String; 3]> {
            let show = |b: Block| [b.open, b.inner, b.close].map(|r| text[r].to_string());
            blocks(text, &turn, &tags()).into_iter().map(show).collect()
        };
        let text = "A:<think>why</think>\n\nso<think>x</think>y";
        let whole = [["<think>", "why", "</think>\n\n"], ["<think>", "x", "</think>"]].map(|b| b.map(String::from));
        assert_eq!(shown(text, 2..text.len()), whole);
        // The prompt has opened it.
        let (text, from) = ("A:<think>\nwhy</think>so", 10);
        assert_eq!(shown(text, from..text.len()), [["<think>", "\nwhy", "</think>"].map(String::from)]);
        assert_eq!(shown("why</think>so", 0..13), [["", "why", "</think>"].map(String::from)]);
        assert_eq!(shown("<think>why", 0..10), Vec::<[String; 3]>::new());
        assert_eq!(shown("no tags", 0..7), Vec::<[String; 3]>::new());
    }

    #[test]
    fn marks_are_taken_out() {
        let text = format!("a{GENERATION}bc{END_GENERATION}d{GENERATION}{END_GENERATION}e");
        assert_eq!(marked(&text).unwrap(), Rendered { text: "abcde".into(), turns: vec![1..3, 4..4] });
        assert!(marked(&format!("{GENERATION}a{GENERATION}")).is_err());
        assert!(marked(&format!("a{END_GENERATION}")).is_err());
    }

    #[test]
    fn prefixes_end_between_characters() {
        assert_eq!(common_prefix("aé", "aè"), 1);
        assert_eq!(common_prefix("abc", "ab"), 2);
        assert_eq!(common_prefix("", "x"), 0);
    }
}
