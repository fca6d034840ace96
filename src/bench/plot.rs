//! A sweep of products as one page of HTML with drawings in SVG: nothing beside the file is needed to look at it.

use std::fmt::Write;

use super::sweep::{Point, Sweep};

/// Pixels: of a cell of the maps, of the scatter's sides, of margins.
const CELL: [usize; 2] = [84, 30];
const SCATTER: [f64; 2] = [760.0, 380.0];
const MARGIN: f64 = 60.0;

const STYLE: &str = "body{font:14px system-ui,sans-serif;margin:24px;color:#222;background:#fff}\
    .maps{display:flex;flex-wrap:wrap;gap:24px}figure{margin:0}figcaption{margin-bottom:6px}\
    svg text{font:11px system-ui,sans-serif;fill:#222}.own{fill:none;stroke:#b3261e;stroke-width:2}\
    .note{background:#fff3cd;padding:8px 12px;border:1px solid #e0c36a}li{margin:2px 0}";

/// The page.
pub fn page(sweep: &Sweep) -> String {
    let (unit, scale) = unit(sweep);
    let mut out = String::new();
    let device = escaped(&sweep.device);
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>zaya bench: products on {device}</title><style>{STYLE}</style>\n\
         <h1>Products on {device}</h1>\n<p>y = x w<sup>T</sup>, x [m, k], w [n, k], {} operands: {unit}, median of the rounds.</p>\n",
        format!("{:?}", sweep.precision).to_lowercase()
    );
    if sweep.software {
        out.push_str("<p class=\"note\">This device is a program that takes a GPU's place: these figures are its own, and say nothing about the speed of any GPU.</p>\n");
    }
    out.push_str("<h2>By shape</h2>\n<div class=\"maps\">\n");
    let grid: Vec<&Point> = sweep.points.iter().filter(|p| p.name.is_none()).collect();
    let best = sweep.points.iter().map(|p| p.gflops).fold(0.0, f64::max);
    for k in distinct(grid.iter().map(|p| p.k)) {
        map(&mut out, &grid, k, best, scale);
    }
    let _ = write!(out, "</div>\n<h2>By arithmetic intensity</h2>\n<p>Grey: the sweep. Red: the model's own shapes.</p>\n");
    scatter(&mut out, sweep, best, unit, scale);
    own_shapes(&mut out, sweep, best, unit, scale);
    if !sweep.advice.is_empty() {
        out.push_str("<h2>Advice</h2>\n<ul>\n");
        sweep.advice.iter().for_each(|line| {
            let _ = writeln!(out, "<li>{}</li>", escaped(line));
        });
        out.push_str("</ul>\n");
    }
    out.push_str("</html>\n");
    out
}

/// GFLOP/s, or TFLOP/s where there are thousands.
pub fn unit(sweep: &Sweep) -> (&'static str, f64) {
    match sweep.points.iter().any(|p| p.gflops >= 10_000.0) {
        true => ("TFLOP/s", 1e-3),
        false => ("GFLOP/s", 1.0),
    }
}

fn distinct(values: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut all: Vec<usize> = values.collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Three digits.
pub fn short(x: f64) -> String {
    match x {
        x if x >= 100.0 => format!("{x:.0}"),
        x if x >= 10.0 => format!("{x:.1}"),
        x if x >= 0.1 => format!("{x:.2}"),
        x => format!("{x:.1e}"),
    }
}

/// M by N at one K: the darker, the nearer to the best.
fn map(out: &mut String, grid: &[&Point], k: usize, best: f64, scale: f64) {
    let (ms, ns) = (distinct(grid.iter().map(|p| p.m)), distinct(grid.iter().map(|p| p.n)));
    let [w, h] = CELL;
    let (left, top) = (60, 34);
    let (width, height) = (left + ns.len() * w, top + ms.len() * h);
    let _ = write!(out, "<figure><figcaption>k = {k}</figcaption><svg width=\"{width}\" height=\"{height}\">");
    for (column, n) in ns.iter().enumerate() {
        let _ = write!(out, "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">n = {n}</text>", left + column * w + w / 2, top - 8);
    }
    for (row, m) in ms.iter().enumerate() {
        let _ = write!(out, "<text x=\"0\" y=\"{}\">m = {m}</text>", top + row * h + h / 2 + 4);
        for (column, n) in ns.iter().enumerate() {
            let Some(point) = grid.iter().find(|p| (p.m, p.n, p.k) == (*m, *n, k)) else { continue };
            let share = point.gflops / best;
            let (x, y) = (left + column * w, top + row * h);
            let _ = write!(
                out,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{w}\" height=\"{h}\" fill=\"hsl(212 70% {:.0}%)\" stroke=\"#fff\"/>\
                 <text x=\"{}\" y=\"{}\" text-anchor=\"middle\" style=\"fill:{}\">{}</text>",
                96.0 - 56.0 * share,
                x + w / 2,
                y + h / 2 + 4,
                if share > 0.6 { "#fff" } else { "#222" },
                short(point.gflops * scale)
            );
        }
    }
    out.push_str("</svg></figure>\n");
}

/// Rate over FLOP a byte, both logarithmic.
fn scatter(out: &mut String, sweep: &Sweep, best: f64, unit: &str, scale: f64) {
    let xs = sweep.points.iter().map(|p| p.flops_per_byte);
    let (x_low, x_high) = (xs.clone().fold(f64::INFINITY, f64::min), xs.fold(0.0, f64::max));
    let y_low = sweep.points.iter().map(|p| p.gflops).fold(f64::INFINITY, f64::min);
    let [width, height] = SCATTER;
    let along = |v: f64, low: f64, high: f64| (v / low).ln() / (high / low).ln().max(1e-9);
    let place = |p: &Point| {
        let (x, y) = (along(p.flops_per_byte, x_low, x_high), along(p.gflops, y_low, best));
        (MARGIN + x * (width - 2.0 * MARGIN), height - MARGIN - y * (height - 2.0 * MARGIN))
    };
    let _ = write!(out, "<svg width=\"{width}\" height=\"{height}\">");
    let (right, bottom) = (width - MARGIN, height - MARGIN);
    let _ = write!(out, "<path d=\"M{MARGIN} {MARGIN}V{bottom}H{right}\" fill=\"none\" stroke=\"#888\"/>");
    for (x, anchor, text) in [(MARGIN, "start", short(x_low)), (right, "end", format!("{} FLOP a byte", short(x_high)))] {
        let _ = write!(out, "<text x=\"{x}\" y=\"{}\" text-anchor=\"{anchor}\">{text}</text>", bottom + 18.0);
    }
    for (y, text) in [(bottom, short(y_low * scale)), (MARGIN - 8.0, format!("{} {unit}", short(best * scale)))] {
        let _ = write!(out, "<text x=\"4\" y=\"{y}\">{text}</text>");
    }
    for p in &sweep.points {
        let (x, y) = place(p);
        let what = format!("{}{} x {} x {}: {} {unit}", name_of(p), p.m, p.n, p.k, short(p.gflops * scale));
        let looks = if p.name.is_some() { "r=\"6\" class=\"own\"" } else { "r=\"4\" fill=\"#9aa4b2\"" };
        let _ = write!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" {looks}><title>{}</title></circle>", escaped(&what));
        if let Some(name) = &p.name {
            let _ = write!(out, "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>", x + 9.0, y + 4.0, escaped(name));
        }
    }
    out.push_str("</svg>\n");
}

fn name_of(p: &Point) -> String {
    p.name.as_ref().map_or(String::new(), |name| format!("{name} "))
}

fn own_shapes(out: &mut String, sweep: &Sweep, best: f64, unit: &str, scale: f64) {
    let own: Vec<&Point> = sweep.points.iter().filter(|p| p.name.is_some()).collect();
    if own.is_empty() {
        return;
    }
    let _ = write!(out, "<h2>The model's shapes</h2>\n<table><tr><th>weight<th>m x n x k<th>{unit}<th>of the best\n");
    for p in own {
        let (name, rate, share) = (escaped(&name_of(p)), short(p.gflops * scale), 100.0 * p.gflops / best);
        let _ = writeln!(out, "<tr><td>{name}<td>{} x {} x {}<td>{rate}<td>{share:.0} %", p.m, p.n, p.k);
    }
    out.push_str("</table>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Times;
    use crate::tensor::backend::Precision;

    fn point(name: Option<&str>, m: usize, gflops: f64) -> Point {
        let times = Times { rounds: 3, calls_per_round: 1, median_s: 1.0, best_s: 1.0, cpu_s: 1.0 };
        Point { name: name.map(String::from), m, n: 16, k: 64, times, flops: 1.0, gflops, flops_per_byte: m as f64 }
    }

    #[test]
    fn a_page_shows_every_shape_once_and_marks_the_models() {
        let points = vec![point(None, 16, 10.0), point(None, 64, 40.0), point(Some("attn.q <x>"), 33, 25.0)];
        let advice = vec!["k < 64".to_string()];
        let sweep = Sweep { device: "a & b".into(), software: true, precision: Precision::F32, points, advice };
        let page = page(&sweep);
        assert_eq!(page.matches("<circle").count(), 3);
        assert_eq!(page.matches("class=\"own\"").count(), 1);
        assert_eq!(page.matches("<rect").count(), 2);
        assert!(page.contains("attn.q &lt;x&gt;") && page.contains("a &amp; b") && page.contains("k &lt; 64"));
        assert!(page.contains("takes a GPU's place") && !page.contains("http"));
        // The best lies at the top of its axis, the slowest at the bottom.
        assert!(page.contains("cy=\"60.0\"") && page.contains("cy=\"320.0\""));
    }

    #[test]
    fn thousands_of_gflops_are_tflops() {
        let of = |gflops| {
            unit(&Sweep {
                device: String::new(),
                software: false,
                precision: Precision::Bf16,
                points: vec![point(None, 1, gflops)],
                advice: vec![],
            })
            .0
        };
        assert_eq!((of(9000.0), of(500_000.0)), ("GFLOP/s", "TFLOP/s"));
    }
}
