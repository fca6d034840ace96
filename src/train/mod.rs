//! The step, the loop, stopping and resuming.
