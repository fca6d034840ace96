//! Where the time of a recording went, verb by verb, against the machine's limits.

use std::fmt::Write;

use super::{SpanKind, Trace};
use crate::tensor::work::{Bound, Limits, Work};

/// All calls of one verb.
#[derive(Debug, Clone, PartialEq)]
pub struct VerbTotal {
    pub name: &'static str,
    pub calls: usize,
    /// Without the verbs that it called itself: these add up.
    pub own_s: f64,
    /// From beginning to end; rates are over this time.
    pub total_s: f64,
    pub work: Work,
    /// Least seconds that the machine's limits allow.
    pub limit_s: f64,
    /// Threads that worked on it on average; None when no task was recorded.
    pub busy: Option<f64>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Most time first.
    pub verbs: Vec<VerbTotal>,
    /// Seconds that phases took beside the verbs and phases inside them, in the order in which they began.
    pub rests: Vec<(&'static str, f64)>,
    /// What everything is a share of: the time of all phases of the name asked for.
    pub whole_s: f64,
    pub times: usize,
}

impl Trace {
    /// Verbs inside phases named `phase`.
    pub fn summary(&self, phase: &str, limits: Limits) -> Summary {
        let mut seconds = vec![0.0; self.calls.len()];
        let mut busy = vec![None::<f64>; self.calls.len()];
        for span in self.threads.iter().flat_map(|t| &t.spans) {
            let (Some(call), s) = (span.call, (span.end - span.start).as_secs_f64()) else { continue };
            match span.kind {
                SpanKind::Call => seconds[call] += s,
                SpanKind::Task => *busy[call].get_or_insert(0.0) += s,
            }
        }
        let mut own = seconds.clone();
        for (i, call) in self.calls.iter().enumerate() {
            if let Some(parent) = call.parent {
                own[parent] -= seconds[i];
            }
        }
        let inside = |mut call: usize| loop {
            if self.calls[call].phase && self.calls[call].name == phase {
                return true;
            }
            match self.calls[call].parent {
                Some(parent) => call = parent,
                None => return false,
            }
        };
        let mut verbs: Vec<VerbTotal> = Vec::new();
        for (i, call) in self.calls.iter().enumerate().filter(|(i, c)| !c.phase && inside(*i)) {
            let at = verbs.iter().position(|v| v.name == call.name).unwrap_or_else(|| {
                let (calls, work) = (0, Work::default());
                verbs.push(VerbTotal { name: call.name, calls, own_s: 0.0, total_s: 0.0, work, limit_s: 0.0, busy: None });
                verbs.len() - 1
            });
            let (verb, work) = (&mut verbs[at], Work { flops: call.flops, bytes: call.bytes });
            verb.calls += 1;
            verb.own_s += own[i];
            verb.total_s += seconds[i];
            verb.work = verb.work + work;
            verb.limit_s += limits.seconds(work);
            // For now thread-seconds.
            verb.busy = verb.busy.into_iter().chain(busy[i]).reduce(|a, b| a + b);
        }
        for verb in &mut verbs {
            verb.busy = verb.busy.map(|s| s / verb.total_s.max(1e-9));
        }
        verbs.sort_by(|a, b| b.own_s.total_cmp(&a.own_s));
        let mut rests: Vec<(&str, f64)> = Vec::new();
        for (i, call) in self.calls.iter().enumerate().filter(|(i, c)| c.phase && inside(*i)) {
            match rests.iter_mut().find(|(name, _)| *name == call.name) {
                Some((_, s)) => *s += own[i],
                None => rests.push((call.name, own[i])),
            }
        }
        let named = self.calls.iter().filter(|c| c.phase && c.name == phase);
        Summary { verbs, rests, whole_s: self.phase_seconds(phase), times: named.count() }
    }
}

impl Summary {
    /// The `top` verbs that took most time, what the others took, and what no verb took, phase by phase. Seconds are per `what`.
    pub fn table(&self, what: &str, limits: Limits, top: usize) -> String {
        let times = self.times.max(1) as f64;
        let (whole, mut out) = (self.whole_s.max(1e-9), String::new());
        let _ = writeln!(
            out,
            "{:<40} {:>7} {:>12} {:>8} {:>16} {:>9} {:>8}",
            "verb",
            "calls",
            format!("ms a {what}"),
            "share",
            "rate",
            "of limit",
            "threads"
        );
        let mut row = |name: &str, calls: String, s: f64, rate: String, fraction: String, busy: String| {
            let share = format!("{:.1} %", 100.0 * s / whole);
            let ms = format!("{:.3}", 1e3 * s / times);
            let line = format!("{name:<40} {calls:>7} {ms:>12} {share:>8} {rate:>16} {fraction:>9} {busy:>8}");
            let _ = writeln!(out, "{}", line.trim_end());
        };
        for v in self.verbs.iter().take(top) {
            let total = v.total_s.max(1e-9);
            let rate = match limits.bound(v.work) {
                _ if v.work == Work::default() => String::new(),
                Bound::Compute => format!("{:.1} GFLOP/s", v.work.flops / total / 1e9),
                Bound::Memory => format!("{:.1} GB/s", v.work.bytes / total / 1e9),
            };
            let fraction = if v.limit_s > 0.0 { format!("{:.1} %", 100.0 * v.limit_s / total) } else { String::new() };
            let busy = v.busy.map_or(String::new(), |b| format!("{b:.2}"));
            row(v.name, (v.calls as f64 / times).round().to_string(), v.own_s, rate, fraction, busy);
        }
        let blank = String::new;
        let rest = self.verbs.iter().skip(top);
        if self.verbs.len() > top {
            let name = format!("{} other verbs", self.verbs.len() - top);
            let calls = rest.clone().map(|v| v.calls).sum::<usize>() as f64 / times;
            row(&name, calls.round().to_string(), rest.map(|v| v.own_s).sum(), blank(), blank(), blank());
        }
        for (phase, s) in &self.rests {
            row(&format!("outside of verbs: {phase}"), blank(), *s, blank(), blank(), blank());
        }
        row(&format!("whole {what}"), blank(), self.whole_s, blank(), blank(), blank());
        out
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{Call, Span, ThreadTrace};
    use super::*;

    /// Two steps of 100 ms, and something before them: step { a 40 { b 10 }, b 20 }, step { a 50 }.
    fn trace() -> Trace {
        let call = |name, flops, bytes, parent, phase| Call { name, flops, bytes, parent, phase };
        let calls = vec![
            call("step", 0.0, 0.0, None, true),
            call("a", 4e6, 1e3, Some(0), false),
            call("b", 1e3, 1e6, Some(1), false),
            call("b", 1e3, 2e6, Some(0), false),
            call("step", 0.0, 0.0, None, true),
            call("a", 5e6, 1e3, Some(4), false),
            call("elsewhere", 1.0, 1.0, None, false),
        ];
        let ms = Duration::from_millis;
        let span = |kind, call, start, end| Span { kind, call: Some(call), start: ms(start), end: ms(end) };
        use SpanKind::{Call as C, Task as T};
        let caller = vec![
            span(C, 2, 20, 30),
            span(T, 1, 10, 45),
            span(C, 1, 10, 50),
            span(C, 3, 60, 80),
            span(C, 0, 0, 100),
            span(T, 5, 100, 150),
            span(C, 5, 100, 150),
            span(C, 4, 100, 200),
            span(C, 6, 300, 400),
        ];
        let helper = vec![span(T, 1, 10, 30), span(T, 5, 110, 140)];
        let thread = |name: &str, spans| ThreadTrace { name: name.into(), spans };
        Trace { calls, threads: vec![thread("0", caller), thread("1", helper)], length: ms(400) }
    }

    const LIMITS: Limits = Limits { flops_per_s: 200e6, bytes_per_s: 200e6 };

    #[test]
    fn time_is_split_between_a_verb_and_those_inside_it() {
        let s = trace().summary("step", LIMITS);
        assert_eq!((s.times, (s.whole_s * 1e3).round()), (2, 200.0));
        let found: Vec<_> = s
            .verbs
            .iter()
            .map(|v| (v.name, v.calls, (v.own_s * 1e3).round(), (v.total_s * 1e3).round(), (v.limit_s * 1e3).round()))
            .collect();
        // a: 9e6 operations at 200e6 a second; b: 3e6 bytes.
        assert_eq!(found, [("a", 2, 80.0, 90.0, 45.0), ("b", 2, 30.0, 30.0, 15.0)]);
        // 35 + 20 + 50 + 30 ms of tasks in 90 ms.
        assert!((s.verbs[0].busy.unwrap() - 1.5).abs() < 1e-9);
        assert_eq!(s.verbs[1].busy, None);
        assert_eq!(s.rests.iter().map(|(name, s)| (*name, (s * 1e3).round())).collect::<Vec<_>>(), [("step", 90.0)]);
    }

    #[test]
    fn the_table_adds_up() {
        let table = trace().summary("step", LIMITS).table("step", LIMITS, 1);
        let lines: Vec<Vec<&str>> = table.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["a", "1", "40.000", "40.0", "%", "0.1", "GFLOP/s", "50.0", "%", "1.50"]);
        assert_eq!(lines[2], ["1", "other", "verbs", "1", "15.000", "15.0", "%"]);
        assert_eq!(lines[3], ["outside", "of", "verbs:", "step", "45.000", "45.0", "%"]);
        assert_eq!(lines[4], ["whole", "step", "100.000", "100.0", "%"]);
        let all = trace().summary("step", LIMITS).table("step", LIMITS, 15);
        assert!(all.contains("0.1 GB/s") && !all.contains("other verbs"), "{all}");
    }
}
