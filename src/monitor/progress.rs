//! Progress of a training run on stderr: a bar on a terminal, a plain line every few seconds elsewhere.

use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Seconds between two plain lines when stderr is not a terminal.
const PLAIN_EVERY: Duration = Duration::from_secs(10);

/// What is shown of one step.
#[derive(Debug, Clone, Copy)]
pub struct Shown {
    /// Steps finished.
    pub step: u64,
    pub loss: f64,
    pub tokens_per_s: f64,
    /// Tokens of all steps, those before a resume included.
    pub tokens_seen: u64,
}

/// A bar on stderr; None where that is no terminal.
pub fn bar(length: u64) -> Option<ProgressBar> {
    let target = ProgressDrawTarget::stderr_with_hz(4);
    (!target.is_hidden()).then(|| {
        let bar = ProgressBar::with_draw_target(Some(length), target);
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {msg}") {
            bar.set_style(style);
        }
        bar
    })
}

/// Shows how far a run is. Dropping it leaves the last state on the screen.
pub struct Progress {
    total_steps: u64,
    start_step: u64,
    started: Instant,
    /// None: stderr is no terminal.
    bar: Option<ProgressBar>,
    last_plain: Option<Instant>,
}

impl Progress {
    /// A run that has taken `start_step` of `total_steps` steps.
    pub fn new(total_steps: u64, start_step: u64) -> Self {
        let bar = bar(total_steps);
        if let Some(bar) = &bar {
            bar.set_position(start_step);
            bar.set_message("first step");
        }
        Self { total_steps, start_step, started: Instant::now(), bar, last_plain: None }
    }

    /// Shows a finished step.
    pub fn step(&mut self, shown: Shown) {
        let line = format_line(shown, self.total_steps, self.eta(shown.step));
        match &self.bar {
            Some(bar) => {
                bar.set_position(shown.step);
                bar.set_message(line);
            }
            None => {
                let due = self.last_plain.is_none_or(|t| t.elapsed() >= PLAIN_EVERY);
                if due || shown.step >= self.total_steps {
                    tell!("{line}");
                    self.last_plain = Some(Instant::now());
                }
            }
        }
    }

    /// Prints a line of its own above the bar.
    pub fn println(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| tell!("{text}")),
            None => tell!("{text}"),
        }
    }

    /// Ends the display; the last state stays.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }

    /// Time left, at the pace of this process so far.
    fn eta(&self, step: u64) -> Option<Duration> {
        let done = step.checked_sub(self.start_step).filter(|d| *d > 0)?;
        let left = self.total_steps.saturating_sub(step);
        Duration::try_from_secs_f64(self.started.elapsed().as_secs_f64() / done as f64 * left as f64).ok()
    }
}

fn format_line(s: Shown, total_steps: u64, eta: Option<Duration>) -> String {
    let eta = match eta {
        Some(d) if s.step < total_steps => format!("ETA {:#}", HumanDuration(d)),
        Some(_) => "done".into(),
        None => "ETA unknown".into(),
    };
    format!(
        "step {}/{total_steps}  loss {:.4}  {} tokens/s  {} tokens  {eta}",
        s.step,
        s.loss,
        short(s.tokens_per_s),
        short(s.tokens_seen as f64)
    )
}

/// Three significant digits and a letter: 1.23k, 45.6M, 7.89B.
fn short(x: f64) -> String {
    let (value, letter) = match x {
        x if x >= 999.5e9 => (x / 1e12, "T"),
        x if x >= 999.5e6 => (x / 1e9, "B"),
        x if x >= 999.5e3 => (x / 1e6, "M"),
        x if x >= 999.5 => (x / 1e3, "k"),
        x => (x, ""),
    };
    let digits = if letter.is_empty() || value >= 99.95 { 0 } else { 1 + usize::from(value < 9.995) };
    format!("{value:.digits$}{letter}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (x, text) in [
            (0.0, "0"),
            (12.3, "12"),
            (999.0, "999"),
            (1000.0, "1.00k"),
            (12_345.0, "12.3k"),
            (999_499.0, "999k"),
            (999_500.0, "1.00M"),
            (4.0e12, "4.00T"),
        ] {
            assert_eq!(short(x), text);
        }
    }

    #[test]
    fn a_line_says_loss_speed_tokens_and_time_left() {
        let shown = Shown { step: 120, loss: 3.25, tokens_per_s: 15_200.0, tokens_seen: 983_040 };
        assert_eq!(
            format_line(shown, 400, Some(Duration::from_secs(192))),
            "step 120/400  loss 3.2500  15.2k tokens/s  983k tokens  ETA 3m"
        );
        assert!(format_line(shown, 400, None).ends_with("ETA unknown"));
        assert!(format_line(Shown { step: 400, ..shown }, 400, Some(Duration::ZERO)).ends_with("done"));
    }

    #[test]
    fn time_left_counts_from_the_resume() {
        let mut p = Progress::new(100, 50);
        p.started = Instant::now() - Duration::from_secs(10);
        let eta = p.eta(60).unwrap().as_secs_f64();
        assert!((39.0..43.0).contains(&eta), "{eta}");
        assert!(p.eta(50).is_none());
    }
}
