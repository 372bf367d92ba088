//! Page about the metrics of a program, from a text with all of them.

use std::fmt::Write as _;

use crate::reference::{code, escape};

/// Metric.
#[derive(Debug, Default, PartialEq, Eq)]
struct Metric<'t> {
    name: &'t str,
    kind: &'t str,
    help: &'t str,
    /// Names of the labels of its first line.
    labels: Vec<&'t str>,
}

/// The page of a program.
pub(crate) fn page(program: &str, text: &str) -> String {
    let mut page = format!(
        "# Metrics of {program}\n\nThis page is generated from the program's definition.\n\n\
         | metric | type | labels | meaning |\n|---|---|---|---|\n"
    );
    for metric in metrics(text) {
        let labels: Vec<_> = metric.labels.into_iter().map(code).collect();
        let cells = [code(metric.name), metric.kind.to_owned(), labels.join(", "), escape(metric.help)];
        // Writing to a text cannot fail.
        writeln!(page, "| {} |", cells.join(" | ")).ok();
    }
    page
}

/// The metrics of a text in the format of Prometheus.
fn metrics(text: &str) -> Vec<Metric<'_>> {
    let mut metrics: Vec<Metric> = Vec::new();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            metrics.push(Metric { name, help, ..Metric::default() });
        }
        let Some(metric) = metrics.last_mut() else { continue };
        if let Some((_, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            metric.kind = kind;
        } else if let Some(labels) = line.strip_prefix(metric.name).and_then(|rest| rest.strip_prefix('{'))
            && metric.labels.is_empty()
        {
            metric.labels = labels.split(',').filter_map(|label| Some(label.split_once('=')?.0)).collect();
        }
    }
    metrics
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_has_its_type_help_and_labels() {
        let text = "# HELP a_total Things.\n# TYPE a_total counter\n\
                    a_total{b=\"1\",c=\"2\"} 3\na_total{b=\"2\",c=\"2\"} 3\n\
                    # HELP d Time.\n# TYPE d histogram\nd_bucket{le=\"1\"} 1\n";
        let expected = [
            Metric { name: "a_total", kind: "counter", help: "Things.", labels: vec!["b", "c"] },
            Metric { name: "d", kind: "histogram", help: "Time.", labels: Vec::new() },
        ];
        assert_eq!(metrics(text), expected);
    }

    #[test]
    fn every_metric_has_a_type_and_a_meaning() {
        for text in [cproxy::status_http::every_metric(), cproxy_relay::every_metric()] {
            let metrics = metrics(&text);
            assert!(metrics.len() > 20 && metrics.iter().all(|of| !of.kind.is_empty() && !of.help.is_empty()));
        }
    }
}
