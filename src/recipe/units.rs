//! Numbers with units: token counts such as "8T", durations such as "90m".

use std::time::Duration;

const TOKEN_UNITS: [(&str, u64); 8] = [
    ("K", 1_000),
    ("M", 1_000_000),
    ("B", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
];

const TOKEN_HELP: &str =
    "units of tokens are K, M, B, T (10^3, 10^6, 10^9, 10^12) and Ki, Mi, Gi, Ti (2^10, 2^20, 2^30, 2^40), as in \"1.2T\"";

/// Tokens from a text such as `8T`, `1.2T`, `16Mi` or `4096`. The result must be a whole number.
pub fn parse_tokens(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(text.len());
    let (number, unit) = (text[..split].replace('_', ""), text[split..].trim_start());
    let (whole, fraction) = number.split_once('.').unwrap_or((&number, ""));
    let digits = format!("{whole}{fraction}");
    if whole.is_empty() || number.ends_with('.') || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(format!("no number of tokens; {TOKEN_HELP}"));
    }
    let scale = if unit.is_empty() {
        1
    } else {
        match TOKEN_UNITS.iter().find(|(name, _)| *name == unit) {
            Some((_, scale)) => *scale,
            None => return Err(format!("`{unit}` is no unit of tokens; {TOKEN_HELP}")),
        }
    };
    let too_large = || "more tokens than 9.2e18, the largest number a recipe can hold".to_string();
    let value: u128 = digits.parse().map_err(|_| too_large())?;
    let divisor = 10u128.checked_pow(fraction.len() as u32).ok_or_else(too_large)?;
    let scaled = value.checked_mul(scale as u128).ok_or_else(too_large)?;
    if !scaled.is_multiple_of(divisor) {
        return Err("not a whole number of tokens".to_string());
    }
    u64::try_from(scaled / divisor).ok().filter(|n| *n <= i64::MAX as u64).ok_or_else(too_large)
}

/// A span of time such as `90s`, `30m`, `12h`, `2d` or `1h30m`; never zero.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    const HELP: &str = "a duration has units s, m, h or d, as in \"90s\", \"30m\", \"1h30m\", \"2d\"";
    let mut rest = text.trim();
    let mut seconds: u64 = 0;
    if rest.is_empty() {
        return Err(HELP.to_string());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let tail = &rest[digits..];
        let letters = tail.find(|c: char| !c.is_alphabetic()).unwrap_or(tail.len());
        let unit = match &tail[..letters] {
            "s" => 1,
            "m" => 60,
            "h" => 3600,
            "d" => 86_400,
            "" => return Err(format!("a number without a unit; {HELP}")),
            other => return Err(format!("`{other}` is no unit of time; {HELP}")),
        };
        let number: u64 = rest[..digits].parse().map_err(|_| format!("no number before the unit; {HELP}"))?;
        seconds = number
            .checked_mul(unit)
            .and_then(|s| s.checked_add(seconds))
            .filter(|s| *s <= 100 * 366 * 86_400)
            .ok_or("longer than a hundred years")?;
        rest = tail[letters..].trim_start();
    }
    if seconds == 0 {
        return Err("a duration of zero".to_string());
    }
    Ok(Duration::from_secs(seconds))
}

/// The inverse of `parse_duration`, to the second.
pub fn format_duration(d: Duration) -> String {
    format!("{}s", d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_counts_have_decimal_and_binary_units() {
        for (text, tokens) in [
            ("4096", 4096),
            ("8T", 8_000_000_000_000),
            ("1.2T", 1_200_000_000_000),
            ("0.5K", 500),
            ("16Mi", 16_777_216),
            ("32Ki", 32_768),
            ("32K", 32_000),
            ("100 M", 100_000_000),
            ("1_000", 1000),
            ("0", 0),
        ] {
            assert_eq!(parse_tokens(text), Ok(tokens), "{text}");
        }
        for text in [
            "",
            "T",
            "8X",
            "8t",
            "8m",
            "1.2",
            "1.2345K",
            "-5",
            "1e9",
            ".5K",
            "5.K",
            "1.2.3K",
            "20000000T",
            "9999999999999999999999",
        ] {
            assert!(parse_tokens(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_need_units() {
        for (text, s) in [("90s", 90), ("30m", 1800), ("1h30m", 5400), ("2d", 172_800), (" 1h 5s ", 3605)] {
            assert_eq!(parse_duration(text), Ok(Duration::from_secs(s)), "{text}");
        }
        for text in
            ["", "30", "1h30", "m", "5x", "5ms", "-5m", "0s", "1.5h", "99999999999999999999s", "999999d", "30 minutes", "5µ"]
        {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert_eq!(parse_duration(&format_duration(Duration::from_secs(5400))), Ok(Duration::from_secs(5400)));
    }
}
