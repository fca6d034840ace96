//! Results as a table for the terminal.

use serde_json::{Map, Value};

const HEAD: [&str; 6] = ["task", "shots", "filter", "metric", "value", "stderr"];

/// The table of `results`, groups with their tasks indented below them.
pub fn render(results: &Value) -> String {
    let empty = Map::new();
    let table = results["results"].as_object().unwrap_or(&empty);
    let groups = results["group_subtasks"].as_object().unwrap_or(&empty);
    let inside: Vec<&str> = groups.values().flat_map(|g| g.as_array().into_iter().flatten()).filter_map(Value::as_str).collect();
    let mut rows = Vec::new();
    for name in table.keys().filter(|n| !inside.contains(&n.as_str())) {
        add(name, 0, table, groups, results, &mut rows);
    }
    lines(&rows)
}

fn add(
    name: &str,
    depth: usize,
    table: &Map<String, Value>,
    groups: &Map<String, Value>,
    results: &Value,
    rows: &mut Vec<[String; 6]>,
) {
    let Some(row) = table.get(name).and_then(Value::as_object) else { return };
    let mut label = format!("{}{name}", "  ".repeat(depth));
    let shots = results["n-shot"].get(name).map_or(String::new(), Value::to_string);
    let metrics = row.iter().filter(|(key, _)| key.contains(',') && !key.contains("_stderr,"));
    let before = rows.len();
    for (key, value) in metrics {
        let (metric, filter) = key.split_once(',').unwrap_or((key, ""));
        let stderr = row.get(&format!("{metric}_stderr,{filter}")).map_or(String::new(), number);
        rows.push([std::mem::take(&mut label), shots.clone(), filter.into(), metric.into(), number(value), stderr]);
    }
    if rows.len() == before {
        rows.push([label, String::new(), String::new(), String::new(), String::new(), String::new()]);
    }
    for member in groups.get(name).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
        add(member, depth + 1, table, groups, results, rows);
    }
}

fn number(v: &Value) -> String {
    match v {
        Value::Number(n) => format!("{:.4}", n.as_f64().unwrap_or(f64::NAN)),
        Value::String(s) => s.clone(),
        _ => String::new(),
    }
}

fn lines(rows: &[[String; 6]]) -> String {
    let width = |i: usize| rows.iter().map(|r| r[i].chars().count()).chain([HEAD[i].len()]).max().unwrap_or(0);
    let widths: [usize; 6] = std::array::from_fn(width);
    let line = |cells: [&str; 6]| {
        let cell = |(i, text): (usize, &str)| {
            let pad = " ".repeat(widths[i] - text.chars().count());
            // Numbers stand at the right.
            if [1, 4, 5].contains(&i) { pad + text } else { text.to_string() + &pad }
        };
        cells.into_iter().enumerate().map(cell).collect::<Vec<_>>().join("  ").trim_end().to_string() + "\n"
    };
    let mut out = line(HEAD);
    out += &line(widths.map(|w| "-".repeat(w)).each_ref().map(String::as_str));
    rows.iter().for_each(|r| out += &line(r.each_ref().map(String::as_str)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn groups_stand_above_their_tasks() {
        let results = json!({
            "results": {
                "mmlu_anatomy": {"alias": "a", "sample_len": 2, "acc,none": 0.5, "acc_stderr,none": 0.25},
                "mmlu": {"acc,none": 0.5, "acc_stderr,none": "N/A"},
                "wikitext": {"word_perplexity,none": 12.0, "word_perplexity_stderr,none": "N/A"},
            },
            "group_subtasks": {"mmlu": ["mmlu_anatomy"]},
            "n-shot": {"mmlu_anatomy": 5, "wikitext": 0},
        });
        let want = "\
task            shots  filter  metric             value  stderr
--------------  -----  ------  ---------------  -------  ------
mmlu                   none    acc               0.5000     N/A
  mmlu_anatomy      5  none    acc               0.5000  0.2500
wikitext            0  none    word_perplexity  12.0000     N/A
";
        assert_eq!(render(&results), want);
    }
}
