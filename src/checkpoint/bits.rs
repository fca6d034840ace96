//! A number in a manifest, to the last bit.

use std::num::ParseIntError;

use serde::{Deserialize, Serialize};

/// An f64 as the 16 hexadecimal digits of its bits: decimal text may come back changed, and knows no NaN.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bits(pub f64);

impl From<Bits> for String {
    fn from(x: Bits) -> String {
        format!("{:016x}", x.0.to_bits())
    }
}

impl TryFrom<String> for Bits {
    type Error = ParseIntError;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        u64::from_str_radix(&text, 16).map(f64::from_bits).map(Bits)
    }
}
