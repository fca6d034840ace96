//! Python's `str` methods. Lengths are in code points.

/// `str.isspace` of one character: White_Space plus U+001C to U+001F, which Rust's `char::is_whitespace` does not count.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `s.strip()`
pub fn strip(s: &str) -> &str {
    s.trim_matches(is_space)
}

/// `s.lstrip()`
pub fn lstrip(s: &str) -> &str {
    s.trim_start_matches(is_space)
}

/// `s.rstrip()`
pub fn rstrip(s: &str) -> &str {
    s.trim_end_matches(is_space)
}

/// `s.capitalize()`: the first character in title case, the rest in lower case.
pub fn capitalize(s: &str) -> String {
    let mut chars = s.chars();
    let Some(first) = chars.next() else { return String::new() };
    // Title case differs from upper case in the digraphs of U+01C4 to U+01F3 and in the expansions of ß and ligatures.
    let title: String = match first {
        'Ǆ' | 'ǅ' | 'ǆ' => "ǅ".into(),
        'Ǉ' | 'ǈ' | 'ǉ' => "ǈ".into(),
        'Ǌ' | 'ǋ' | 'ǌ' => "ǋ".into(),
        'Ǳ' | 'ǲ' | 'ǳ' => "ǲ".into(),
        _ => {
            let mut upper = first.to_uppercase();
            let head: String = upper.next().into_iter().collect();
            // The rest of an expansion is lower case: "ß" becomes "Ss".
            head + &upper.flat_map(char::to_lowercase).collect::<String>()
        }
    };
    // Lower-cased as one string, for the final sigma.
    let lowered = s.to_lowercase();
    let skip: usize = first.to_lowercase().map(char::len_utf8).sum();
    title + &lowered[skip..]
}

/// `s.split()`: at runs of white space, none at the ends.
pub fn split_whitespace(s: &str) -> Vec<&str> {
    s.split(is_space).filter(|part| !part.is_empty()).collect()
}

/// `s.isdigit()` for what occurs in practice: not empty, and only decimal digits or superscripts.
pub fn is_digit(s: &str) -> bool {
    !s.is_empty() && s.chars().all(|c| c.is_ascii_digit() || (!c.is_ascii() && is_other_digit(c)))
}

/// Digits outside ASCII: the decimal numbers of the common scripts, superscripts, subscripts and circled digits.
fn is_other_digit(c: char) -> bool {
    const ZEROS: [u32; 20] = [
        0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xc66, 0xce6, 0xd66, 0xe50, 0xed0, 0xf20, 0x1040, 0x17e0,
        0x1810, 0xff10, 0x1d7ce,
    ];
    let code = c as u32;
    ZEROS.iter().any(|zero| (*zero..zero + 10).contains(&code))
        || matches!(code, 0xb2 | 0xb3 | 0xb9 | 0x2070 | 0x2074..=0x2079 | 0x2080..=0x2089 | 0x2460..=0x2468)
}

/// `len(s)`
pub fn len(s: &str) -> usize {
    s.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strips_what_python_strips() {
        assert_eq!(rstrip("a\u{1c}\u{85}\u{a0}\u{3000}\n\t "), "a");
        assert_eq!(rstrip("a\u{200b}"), "a\u{200b}");
        assert_eq!(strip("\u{1f} a "), "a");
    }

    #[test]
    fn capitalizes_as_python_does() {
        assert_eq!(capitalize("hELLO World"), "Hello world");
        assert_eq!(capitalize("ßA"), "Ssa");
        assert_eq!(capitalize("ΟΔΟΣ"), "Οδος");
        assert_eq!(capitalize(""), "");
    }

    #[test]
    fn digits_are_not_signs() {
        assert!(is_digit("007") && is_digit("²") && is_digit("٣"));
        assert!(!is_digit("-1") && !is_digit("1.0") && !is_digit("") && !is_digit("½"));
    }
}
