//! `report.html`: the results on one page, plots as inline SVG, nothing fetched from anywhere.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Map, Value};

const STYLE: &str = "body{font:14px/1.45 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}\
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:left}\
td.n{text-align:right;font-variant-numeric:tabular-nums}svg{font:12px system-ui,sans-serif}.bar{fill:#4a7ab5}\
.ci{stroke:#222;stroke-width:1.5}.axis{stroke:#bbb}h2{margin-top:2rem}code{background:#f3f3f3;padding:0 .2rem}";

/// A value to plot.
struct Point {
    label: String,
    value: f64,
    interval: Option<(f64, f64)>,
}

/// The page of `results` (the contents of results.json).
pub fn render(results: &Value) -> String {
    let mut out = String::new();
    let title = results["config"]["model"].as_str().unwrap_or("a model");
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Evaluation of {0}</title><style>{STYLE}</style></head>\
         <body>\n<h1>Evaluation of {0}</h1>\n",
        escape(title)
    );
    facts(&mut out, results);
    out += "<h2>Results</h2>\n";
    table(&mut out, results);
    for (metric, points) in points(results) {
        let _ = write!(out, "<h2>{}</h2>\n{}", escape(&metric), plot(&points));
    }
    remarks(&mut out, results);
    out + "</body></html>\n"
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn plain(v: &Value) -> String {
    match v {
        Value::String(s) => s.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

fn facts(out: &mut String, results: &Value) {
    let zaya = &results["zaya"];
    let rows = [
        ("rules", &zaya["compat"]),
        ("model SHA-256", &zaya["model_sha256"]),
        ("step", &zaya["step"]),
        ("parameters", &results["config"]["model_num_parameters"]),
        ("arithmetic", &results["config"]["model_dtype"]),
        ("tokenizer SHA-256", &zaya["tokenizer_sha256"]),
        ("longest input, tokens", &results["max_length"]),
        ("documents a task, limit", &results["config"]["limit"]),
        ("seed", &results["config"]["fewshot_seed"]),
        ("tokens computed", &zaya["tokens"]["forward"]),
        ("tokens taken from shared prefixes", &zaya["tokens"]["reused"]),
    ];
    out.push_str("<table>\n");
    for (name, value) in rows.iter().filter(|(_, v)| !v.is_null()) {
        let _ = writeln!(out, "<tr><th>{name}</th><td><code>{}</code></td></tr>", escape(&plain(value)));
    }
    out.push_str("</table>\n");
}

/// Metrics of a row: name, filter, value, standard error.
fn metrics(row: &Map<String, Value>) -> impl Iterator<Item = (&str, &str, &Value, Option<&Value>)> {
    row.iter().filter_map(|(key, value)| {
        let (metric, filter) = key.split_once(',')?;
        (!metric.ends_with("_stderr")).then(|| (metric, filter, value, row.get(&format!("{metric}_stderr,{filter}"))))
    })
}

fn rows(results: &Value) -> impl Iterator<Item = (&String, &Map<String, Value>)> {
    results["results"].as_object().into_iter().flatten().filter_map(|(name, row)| Some((name, row.as_object()?)))
}

fn table(out: &mut String, results: &Value) {
    out.push_str("<table>\n<tr><th>task</th><th>shots</th><th>documents</th><th>metric</th><th>value</th><th>stderr</th></tr>\n");
    for (name, row) in rows(results) {
        for (metric, filter, value, stderr) in metrics(row) {
            let number = |v: &Value| v.as_f64().map_or_else(|| plain(v), |x| format!("{x:.4}"));
            let _ = writeln!(
                out,
                "<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
                escape(name),
                plain(&results["n-shot"][name.as_str()]),
                row.get("sample_len").map(plain).unwrap_or_default(),
                escape(&format!("{metric}, {filter}")),
                number(value),
                stderr.map(number).unwrap_or_default(),
            );
        }
    }
    out.push_str("</table>\n");
}

/// By metric what there is to plot, with Wilson's interval or two standard errors to either side.
fn points(results: &Value) -> BTreeMap<String, Vec<Point>> {
    let mut out: BTreeMap<String, Vec<Point>> = BTreeMap::new();
    for (name, row) in rows(results) {
        for (metric, filter, value, stderr) in metrics(row) {
            let Some(value) = value.as_f64() else { continue };
            let wilson = &results["zaya"]["tasks"][name.as_str()]["ci95"][format!("{metric},{filter}")];
            let wilson = wilson[0].as_f64().zip(wilson[1].as_f64());
            let by_stderr = stderr.and_then(Value::as_f64).map(|se| (value - 1.96 * se, value + 1.96 * se));
            let label = if filter == "none" { name.clone() } else { format!("{name} ({filter})") };
            out.entry(metric.to_string()).or_default().push(Point { label, value, interval: wilson.or(by_stderr) });
        }
    }
    out
}

/// Horizontal bars with their intervals.
fn plot(points: &[Point]) -> String {
    const ROW: f64 = 20.0;
    const LEFT: f64 = 300.0;
    const WIDTH: f64 = 480.0;
    let largest = points.iter().map(|p| p.interval.map_or(p.value, |i| i.1).max(p.value)).fold(0.0f64, f64::max);
    // Shares have the whole scale.
    let scale = if largest <= 1.0 { 1.0 } else { largest };
    let x = |v: f64| LEFT + WIDTH * (v / scale).clamp(0.0, 1.0);
    let height = ROW * points.len() as f64;
    let mut out = format!("<svg width=\"880\" height=\"{}\" role=\"img\">\n", height + 24.0);
    for tick in 0..=4 {
        let v = scale * f64::from(tick) / 4.0;
        let _ = writeln!(
            out,
            "<line class=\"axis\" x1=\"{0:.1}\" y1=\"0\" x2=\"{0:.1}\" y2=\"{height}\"/><text x=\"{0:.1}\" y=\"{1}\" text-anchor=\"middle\">{2}</text>",
            x(v),
            height + 16.0,
            if scale == 1.0 { format!("{v:.2}") } else { format!("{v:.4}") }
        );
    }
    for (i, p) in points.iter().enumerate() {
        let y = ROW * i as f64;
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text><rect class=\"bar\" x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"12\"><title>{}: {:.4}</title></rect>",
            LEFT - 8.0,
            y + 14.0,
            escape(&p.label),
            y + 4.0,
            x(p.value) - LEFT,
            escape(&p.label),
            p.value
        );
        if let Some((low, high)) = p.interval {
            let _ = writeln!(
                out,
                "<line class=\"ci\" x1=\"{:.1}\" y1=\"{2:.1}\" x2=\"{:.1}\" y2=\"{2:.1}\"/>",
                x(low),
                x(high),
                y + 10.0
            );
        }
    }
    out + "</svg>\n"
}

/// Notes on the data, and counts that are not zero.
fn remarks(out: &mut String, results: &Value) {
    let tasks = || results["zaya"]["tasks"].as_object().into_iter().flatten();
    let mut lines: Vec<String> = Vec::new();
    for (_, task) in tasks() {
        lines.extend(task["notes"].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_string));
    }
    lines.dedup();
    for (_, says) in results["zaya"]["skipped"].as_object().into_iter().flatten() {
        lines.push(format!("left out: {}", plain(says)));
    }
    for (name, task) in tasks() {
        for kind in ["counts", "faults"] {
            for (what, n) in task[kind].as_object().into_iter().flatten().filter(|(_, n)| n.as_u64() != Some(0)) {
                lines.push(format!("{name}: {n} {}", what.replace('_', " ")));
            }
        }
    }
    if !lines.is_empty() {
        out.push_str("<h2>Remarks</h2>\n<ul>\n");
        for line in lines {
            let _ = writeln!(out, "<li>{}</li>", escape(&line));
        }
        out.push_str("</ul>\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_page_holds_values_bars_and_remarks_and_fetches_nothing() {
        let results = json!({
            "config": {"model": "a<b"},
            "results": {"arc": {"sample_len": 40, "acc,none": 0.25, "acc_stderr,none": 0.05}},
            "n-shot": {"arc": 25},
            "zaya": {"tasks": {"arc": {"ci95": {"acc,none": [0.2, 0.5]}, "counts": {"ties": 3, "timeouts": 0}, "notes": ["a sample"]}}},
        });
        let page = render(&results);
        for part in ["a&lt;b", "0.2500", "width=\"120.0\"", "x1=\"396.0\"", "x2=\"540.0\"", "arc: 3 ties", "a sample"] {
            assert!(page.contains(part), "{part} is not in {page}");
        }
        assert!(!page.contains("http") && !page.contains("<script") && !page.contains("timeouts"));
    }
}
