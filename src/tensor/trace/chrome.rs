//! A recording as Chrome's trace events, which Perfetto and `chrome://tracing` show.

use std::cmp::Reverse;
use std::io::{self, Write};

use serde_json::{Value, json};

use super::{Span, SpanKind, Trace};

/// All in one process.
const PID: u32 = 1;

impl Trace {
    /// Writes the trace-event document: a row per thread, verbs over their tasks; times in microseconds since the start.
    pub fn write_chrome(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n")?;
        let name = json!({"ph": "M", "pid": PID, "name": "process_name", "args": {"name": "zaya"}});
        write!(out, "{name}")?;
        for (tid, thread) in self.threads.iter().enumerate() {
            let name = json!({"ph": "M", "pid": PID, "tid": tid, "name": "thread_name", "args": {"name": thread.name}});
            let order = json!({"ph": "M", "pid": PID, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}});
            write!(out, ",\n{name},\n{order}")?;
            let mut spans: Vec<&Span> = thread.spans.iter().collect();
            // A span before those inside it; of two that cover the same time, the one that ended later.
            spans.reverse();
            spans.sort_by_key(|s| (s.start, Reverse(s.end)));
            for span in spans {
                write!(out, ",\n{}", self.event(tid, span))?;
            }
        }
        out.write_all(b"\n]}\n")
    }

    fn event(&self, tid: usize, span: &Span) -> Value {
        let call = span.call.map(|i| &self.calls[i]);
        let category = match (span.kind, call) {
            (SpanKind::Task, _) => "task",
            (_, Some(call)) if call.phase => "phase",
            _ => "verb",
        };
        let us = |d: std::time::Duration| d.as_nanos() as f64 / 1e3;
        let mut event = json!({
            "ph": "X", "pid": PID, "tid": tid, "cat": category, "name": call.map_or("task", |c| c.name),
            "ts": us(span.start), "dur": us(span.end - span.start),
        });
        if let ("verb", Some(call)) = (category, call) {
            let seconds = (span.end - span.start).as_secs_f64().max(1e-9);
            event["args"] = json!({
                "GFLOP": call.flops / 1e9, "MB": call.bytes / 1e6,
                "GFLOP/s": call.flops / seconds / 1e9, "GB/s": call.bytes / seconds / 1e9,
            });
        }
        event
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{Call, ThreadTrace};
    use super::*;

    #[test]
    fn a_document_that_perfetto_takes() {
        let us = Duration::from_micros;
        let call = |name, flops, phase| Call { name, flops, bytes: 3e6, parent: None, phase };
        let span = |kind, call, start, end| Span { kind, call, start: us(start), end: us(end) };
        let threads = vec![
            ThreadTrace {
                name: "worker \"0\"".into(),
                spans: vec![
                    span(SpanKind::Task, Some(1), 10, 15),
                    span(SpanKind::Call, Some(1), 10, 20),
                    span(SpanKind::Call, Some(0), 5, 30),
                ],
            },
            ThreadTrace { name: "worker 1".into(), spans: vec![span(SpanKind::Task, None, 7, 9)] },
        ];
        let trace = Trace { calls: vec![call("step", 0.0, true), call("linear", 2e6, false)], threads, length: us(40) };
        let mut out = Vec::new();
        trace.write_chrome(&mut out).unwrap();
        let document: Value = serde_json::from_slice(&out).unwrap();
        let events = document["traceEvents"].as_array().unwrap();
        let names: Vec<_> = events.iter().filter(|e| e["name"] == "thread_name").map(|e| &e["args"]["name"]).collect();
        assert_eq!(names, ["worker \"0\"", "worker 1"]);
        let spans: Vec<_> = events
            .iter()
            .filter(|e| e["ph"] == "X")
            .map(|e| (e["tid"].as_u64(), e["cat"].as_str(), e["name"].as_str(), e["ts"].as_f64(), e["dur"].as_f64()))
            .collect();
        let expected = [
            (0, "phase", "step", 5.0, 25.0),
            (0, "verb", "linear", 10.0, 10.0),
            (0, "task", "linear", 10.0, 5.0),
            (1, "task", "task", 7.0, 2.0),
        ];
        let expected = expected.map(|(tid, cat, name, ts, dur)| (Some(tid), Some(cat), Some(name), Some(ts), Some(dur)));
        assert_eq!(spans, expected);
        let linear = events.iter().find(|e| e["cat"] == "verb").unwrap();
        let rate = |key: &str| linear["args"][key].as_f64().unwrap().round();
        assert_eq!((rate("GFLOP/s"), rate("GB/s")), (200.0, 300.0));
    }
}
