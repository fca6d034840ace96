//! Muon, AdamW, expert balancing, schedules.
