//! Scores of groups from those of their tasks.

use super::aggregate::Figure;
use super::numeric::square;

/// A task's part in a group.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    pub value: f64,
    pub stderr: Figure,
    /// Documents.
    pub size: usize,
}

/// Mean over documents or over tasks, and its standard error; "N/A" when a task has none.
pub fn aggregate(parts: &[Part], weight_by_size: bool) -> (f64, Figure) {
    let weight = |p: &Part| if weight_by_size { p.size as f64 } else { 1.0 };
    let total: f64 = parts.iter().map(weight).sum();
    let value = parts.iter().fold(0.0, |sum, p| sum + p.value * weight(p)) / total;
    let Some(stderrs) = parts.iter().map(|p| p.stderr.number()).collect::<Option<Vec<f64>>>() else {
        return (value, Figure::NotAvailable);
    };
    let stderr = if weight_by_size { pooled(parts, &stderrs) } else { unweighted(&stderrs) };
    (value, Figure::Number(stderr))
}

/// sqrt( sum (n - 1) se^2 n / (sum n - m) / sum n )
fn pooled(parts: &[Part], stderrs: &[f64]) -> f64 {
    let total: usize = parts.iter().map(|p| p.size).sum();
    let spread = parts.iter().zip(stderrs).fold(0.0, |sum, (p, se)| sum + (p.size as f64 - 1.0) * square(*se) * p.size as f64);
    (spread / (total as f64 - parts.len() as f64) / total as f64).sqrt()
}

/// sqrt( sum se^2 ) / m
fn unweighted(stderrs: &[f64]) -> f64 {
    stderrs.iter().fold(0.0, |sum, se| sum + square(*se)).sqrt() / stderrs.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    // lm-eval's own aggregate_subtask_metrics, pooled_sample_stderr and unweighted_mean_stderr (B21: unequal sizes).
    #[test]
    fn means_over_documents_and_over_tasks() {
        let part = |value, stderr, size| Part { value, stderr: Figure::Number(stderr), size };
        let parts = [part(0.5, 0.16666666666666666, 10), part(0.9, 0.0318, 90)];
        assert_eq!(aggregate(&parts, true), (0.86, Figure::Number(0.03288823435795351)));
        assert_eq!(aggregate(&parts, false), (0.7, Figure::Number(0.08483663385851918)));
        let without = [parts[0], Part { stderr: Figure::NotAvailable, ..parts[1] }];
        assert_eq!(aggregate(&without, true).1, Figure::NotAvailable);
    }
}
