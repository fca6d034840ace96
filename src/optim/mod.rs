//! Muon, AdamW, expert balancing, schedules.

pub mod balance;
pub mod update;
