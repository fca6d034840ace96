//! Muon, AdamW, expert balancing, schedules.

pub mod schedule;
