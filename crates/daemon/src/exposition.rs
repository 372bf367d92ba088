//! Metrics as text, for Prometheus: its own format, or OpenMetrics 1.0.

use std::fmt::{self, Display, Write as _};

/// Format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsFormat {
    /// Prometheus's text format 0.0.4, which every scraper reads.
    Text,
    /// OpenMetrics 1.0: other names in the comments of counters, and an end.
    OpenMetrics,
}

impl MetricsFormat {
    /// The format for a request with this header `Accept`.
    #[must_use]
    pub fn of_accept(accept: Option<&str>) -> Self {
        let wants = accept.is_some_and(|accept| accept.contains("application/openmetrics-text"));
        if wants { Self::OpenMetrics } else { Self::Text }
    }

    /// The header `Content-Type`.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Number that only grows. Its name ends with `_total`.
    Counter,
    /// Number that grows and shrinks.
    Gauge,
    /// Numbers of observations up to bounds, with their sum.
    Histogram,
}

/// Metrics that are being written.
#[derive(Debug)]
pub struct Exposition {
    format: MetricsFormat,
    text: String,
}

impl Exposition {
    /// No metrics yet.
    #[must_use]
    pub fn new(format: MetricsFormat) -> Self {
        Self { format, text: String::new() }
    }

    /// Starts a metric. Its lines follow.
    pub fn start(&mut self, name: &str, kind: MetricKind, help: &str) {
        let kind_name = match kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        };
        let name = match self.format {
            MetricsFormat::Text => name,
            MetricsFormat::OpenMetrics => name.strip_suffix("_total").unwrap_or(name),
        };
        // Writing to a text cannot fail.
        writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind_name}").ok();
    }

    /// Writes a line of the metric.
    pub fn line(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        writeln!(self.text, "{name}{} {value}", Labels(labels)).ok();
    }

    /// Writes a metric that has one line.
    pub fn number(&mut self, name: &str, kind: MetricKind, help: &str, value: impl Display) {
        self.start(name, kind, help);
        self.line(name, &[], value);
    }

    /// Writes a histogram of seconds.
    pub fn histogram<const N: usize>(&mut self, name: &str, help: &str, histogram: &Histogram<N>) {
        self.start(name, MetricKind::Histogram, help);
        let mut total = 0;
        for (bound, count) in histogram.bounds.iter().zip(histogram.counts) {
            total += count;
            // OpenMetrics wants a point in each bound.
            self.line(&format!("{name}_bucket"), &[("le", &format!("{bound:?}"))], total);
        }
        total += histogram.beyond;
        self.line(&format!("{name}_bucket"), &[("le", "+Inf")], total);
        self.line(&format!("{name}_sum"), &[], format_args!("{:?}", histogram.sum));
        self.line(&format!("{name}_count"), &[], total);
    }

    /// All metrics.
    #[must_use]
    pub fn finish(mut self) -> String {
        if self.format == MetricsFormat::OpenMetrics {
            self.text.push_str("# EOF\n");
        }
        self.text
    }
}

/// Labels of a line, with their values escaped.
struct Labels<'a>(&'a [(&'a str, &'a str)]);

impl Display for Labels<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, value)) in self.0.iter().enumerate() {
            f.write_str(if index == 0 { "{" } else { "," })?;
            write!(f, "{name}=\"")?;
            for char in value.chars() {
                match char {
                    '\\' | '"' => write!(f, "\\{char}")?,
                    '\n' => f.write_str("\\n")?,
                    char => f.write_char(char)?,
                }
            }
            f.write_char('"')?;
        }
        if self.0.is_empty() { Ok(()) } else { f.write_char('}') }
    }
}

/// Numbers of observations in seconds, up to fixed bounds.
#[derive(Clone, Debug)]
pub struct Histogram<const N: usize> {
    bounds: &'static [f64; N],
    counts: [u64; N],
    beyond: u64,
    sum: f64,
}

impl<const N: usize> Histogram<N> {
    /// No observations yet. The bounds ascend.
    #[must_use]
    pub fn new(bounds: &'static [f64; N]) -> Self {
        Self { bounds, counts: [0; N], beyond: 0, sum: 0.0 }
    }

    /// Adds an observation.
    pub fn observe(&mut self, seconds: f64) {
        let buckets = self.bounds.iter().zip(&mut self.counts);
        let bucket = buckets.into_iter().find(|(bound, _)| seconds <= **bound).map(|(_, count)| count);
        *bucket.unwrap_or(&mut self.beyond) += 1;
        self.sum += seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(format: MetricsFormat) -> String {
        let mut metrics = Exposition::new(format);
        metrics.start("a_total", MetricKind::Counter, "Things.");
        metrics.line("a_total", &[("name", "x\"\\\ny"), ("code", "200")], 3);
        metrics.number("b", MetricKind::Gauge, "State.", 0.5);
        let mut histogram = Histogram::new(&[0.25, 1.0]);
        for seconds in [0.25, 0.5, 4.0] {
            histogram.observe(seconds);
        }
        metrics.histogram("c_seconds", "Times.", &histogram);
        metrics.finish()
    }

    #[test]
    fn metrics_are_text_for_every_scraper() {
        assert_eq!(
            written(MetricsFormat::Text),
            "# HELP a_total Things.\n# TYPE a_total counter\na_total{name=\"x\\\"\\\\\\ny\",code=\"200\"} 3\n\
             # HELP b State.\n# TYPE b gauge\nb 0.5\n\
             # HELP c_seconds Times.\n# TYPE c_seconds histogram\n\
             c_seconds_bucket{le=\"0.25\"} 1\nc_seconds_bucket{le=\"1.0\"} 2\nc_seconds_bucket{le=\"+Inf\"} 3\n\
             c_seconds_sum 4.75\nc_seconds_count 3\n"
        );
    }

    #[test]
    fn open_metrics_name_counters_without_their_suffix_and_have_an_end() {
        let (text, open) = (written(MetricsFormat::Text), written(MetricsFormat::OpenMetrics));
        let expected = text.replace("# HELP a_total", "# HELP a").replace("# TYPE a_total", "# TYPE a") + "# EOF\n";
        assert_eq!(open, expected);
    }

    #[test]
    fn a_scraper_gets_open_metrics_if_it_asks_for_them() {
        let prometheus = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert_eq!(MetricsFormat::of_accept(Some(prometheus)), MetricsFormat::OpenMetrics);
        for other in [None, Some("*/*"), Some("text/plain")] {
            assert_eq!(MetricsFormat::of_accept(other), MetricsFormat::Text);
        }
    }
}
