//! Metrics and where they go.
