//! Metrics and where they go: `metrics.jsonl` for programs (`docs/METRICS.md`), a progress bar for people.

pub mod metrics;
pub mod progress;

pub use metrics::{Metrics, MetricsWriter, read_metrics};
pub use progress::Progress;
