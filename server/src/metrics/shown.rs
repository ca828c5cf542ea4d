//! The metrics that grafana/ shows are the metrics that the daemon exports.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use wald_storage::{Quota, QuotaCounts, QuotaLimits, QuotaUse, Statistics};

use super::Metrics;
use crate::auth::TenantUsage;

/// A metric that Prometheus itself has for every target.
const FOREIGN: &str = "up";
/// Exported only where a setting asks for it.
const ON_REQUEST: &str = "wald_cursor_lag_records";
/// Words of PromQL that may stand without a parenthesis behind them.
const KEYWORDS: [&str; 8] = [
    "and", "or", "unless", "offset", "sum", "min", "max", "count",
];
/// Words with labels in parentheses behind them.
const GROUPINGS: [&str; 5] = ["by", "without", "on", "ignoring", "group_left"];

/// The metrics that an expression of PromQL names: every word that is neither a function
/// nor a keyword nor a label.
fn named(expression: &str) -> BTreeSet<String> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut found = BTreeSet::new();
    let mut rest = expression;
    while let Some(first) = rest.chars().next() {
        let (token, tail) = rest.split_at(rest.find(|c| !word(c)).unwrap_or(rest.len()));
        let close = match first {
            '{' => Some('}'),
            '[' => Some(']'),
            _ => GROUPINGS.contains(&token).then_some(')'),
        };
        if let Some(close) = close {
            rest = rest.split_once(close).map_or("", |(_, behind)| behind);
        } else if first == '$' {
            rest = rest[1..].trim_start_matches(word);
        } else if token.is_empty() {
            rest = &rest[first.len_utf8()..];
        } else {
            let function = tail.trim_start().starts_with('(');
            if !first.is_ascii_digit() && !function && !KEYWORDS.contains(&token) {
                found.insert(token.to_owned());
            }
            rest = tail;
        }
    }
    found
}

fn files(folder: &str, extension: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../grafana")
        .join(folder);
    let found: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_str().unwrap().ends_with(extension))
        .collect();
    assert!(!found.is_empty(), "nothing in {}", folder.display());
    found
}

/// Every query of a dashboard: of panels, annotations and variables.
fn queries(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| queries(item, found)),
        Value::Object(fields) => {
            for (key, value) in fields {
                match value.as_str() {
                    Some(text) if key == "expr" => found.push(text.to_owned()),
                    Some(text) if text.starts_with("label_values(") => {
                        let (metric, _label) =
                            text["label_values(".len()..].rsplit_once(',').unwrap();
                        found.push(metric.to_owned());
                    }
                    _ => queries(value, found),
                }
            }
        }
        _ => {}
    }
}

/// Every expression of a file of rules: the text after `expr:`, also on deeper lines.
fn expressions(rules: &str) -> Vec<String> {
    let depth = |line: &str| line.len() - line.trim_start().len();
    let lines: Vec<&str> = rules.lines().collect();
    let begins = |line: &&str| line.trim_start().starts_with("expr:");
    let mut found = Vec::new();
    for at in (0..lines.len()).filter(|at| begins(&lines[*at])) {
        let first = lines[at].trim_start().trim_start_matches("expr:");
        let more = lines[at + 1..]
            .iter()
            .take_while(|line| depth(line) > depth(lines[at]));
        let whole: Vec<&str> = [first.trim_start().trim_start_matches('|')]
            .into_iter()
            .chain(more.copied())
            .collect();
        found.push(whole.join(" "));
    }
    found
}

/// Metrics by the name of the file that names them.
fn shown() -> BTreeMap<String, BTreeSet<String>> {
    let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for path in files("dashboards", ".json") {
        let mut found = Vec::new();
        queries(
            &serde_json::from_slice(&fs::read(&path).unwrap()).unwrap(),
            &mut found,
        );
        assert!(!found.is_empty(), "no query in {}", path.display());
        all.insert(
            path.display().to_string(),
            found.iter().flat_map(|text| named(text)).collect(),
        );
    }
    for path in files("alerts", ".rules.yaml") {
        let found = expressions(&fs::read_to_string(&path).unwrap());
        assert!(!found.is_empty(), "no rule in {}", path.display());
        all.insert(
            path.display().to_string(),
            found.iter().flat_map(|text| named(text)).collect(),
        );
    }
    all
}

/// The metrics in /metrics: for each the names of its samples.
fn exported() -> BTreeMap<String, Vec<String>> {
    // A tenant and a replica have metrics of their own.
    let metrics = Metrics::new().unwrap();
    metrics.replica().unwrap();
    metrics.forwards().unwrap();
    let tenant = std::sync::Arc::new(TenantUsage::new("a", 1));
    metrics.watch_tenants(move || vec![std::sync::Arc::clone(&tenant)]);
    let quota = Quota {
        tenant: "a".into(),
        prefix: "a/".into(),
        limits: QuotaLimits {
            logs: Some(1),
            ..QuotaLimits::default()
        },
    };
    let now = Statistics {
        quotas: vec![QuotaUse {
            quota,
            used: QuotaCounts::default(),
        }],
        ..Statistics::default()
    };
    let text = String::from_utf8(metrics.encode(Some(&now), &[]).unwrap()).unwrap();
    text.lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .map(|(name, kind)| {
            let suffixes: &[&str] = match kind {
                "histogram" => &["_bucket", "_sum", "_count"],
                _ => &[""],
            };
            let samples = suffixes.iter().map(|suffix| format!("{name}{suffix}"));
            (name.to_owned(), samples.collect())
        })
        .collect()
}

#[test]
fn dashboards_and_alerts_name_only_metrics_that_exist() {
    let exported = exported();
    let samples: BTreeSet<&str> = exported.values().flatten().map(String::as_str).collect();
    for (file, names) in shown() {
        for name in names {
            assert!(
                name == FOREIGN || name == ON_REQUEST || samples.contains(name.as_str()),
                "{file} names {name}, which the daemon does not export"
            );
        }
    }
}

#[test]
fn every_metric_is_shown_by_a_dashboard() {
    let shown: BTreeSet<String> = shown()
        .into_iter()
        .filter(|(file, _)| file.ends_with(".json"))
        .flat_map(|(_, names)| names)
        .collect();
    for (metric, samples) in exported() {
        assert!(
            samples.iter().any(|sample| shown.contains(sample)),
            "{metric} is in no panel of grafana/dashboards"
        );
    }
}

#[test]
fn names_are_told_from_functions_keywords_labels_and_numbers() {
    let names = |text| named(text).into_iter().collect::<Vec<_>>();
    assert_eq!(
        names(
            r#"histogram_quantile(0.99, sum by (le, job) (rate(a_bucket{x=~"b|c"}[$__rate_interval]))) > 1e3"#
        ),
        ["a_bucket"]
    );
    assert_eq!(
        names(
            "d / on (job, instance) sum by (job) (e) < 0.1 and (4 * f) unless g[5m] or max(h) < $_ms"
        ),
        ["d", "e", "f", "g", "h"]
    );
    let rules = "- alert: A\n  expr: |\n    a\n      > 1\n  for: 1m\n- alert: B\n  expr: b == 1\n";
    assert_eq!(expressions(rules), ["     a       > 1", "b == 1"]);
}
