//! Counters of the relay, and their text for Prometheus.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use cproxy_daemon::{
    Exposition,
    MetricKind::{self, Counter, Gauge},
    MetricsFormat, log_lines_left_out,
};
use cproxy_relay_auth::{RefusalCounters, ReviewCounts};
use cproxy_relay_core::{KINDS, Kind};

use crate::{
    cache::Cache,
    config::PolicySource,
    policies::{PolicyCounts, PolicyService},
    responses::lists::CompressedLists,
};

/// Number that grows, or grows and shrinks.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, number: u64) {
        self.0.fetch_add(number, Ordering::Relaxed);
    }

    pub(crate) fn subtract(&self, number: u64) {
        self.0.fetch_sub(number, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Kind of request, for the counter of requests.
pub(crate) type RequestLabels = (&'static str, &'static str, u16);

/// Counters of clients.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    pub(crate) connections: Count,
    pub(crate) connections_accepted: Count,
    pub(crate) connections_refused: Count,
    pub(crate) connections_displaced: Count,
    pub(crate) connections_cut: Count,
    pub(crate) connections_moved: Count,
    pub(crate) handshakes_failed: Count,
    pub(crate) watch_chunks: Count,
    pub(crate) watch_bytes: Count,
    pub(crate) refusals: RefusalCounters,
    requests: Mutex<BTreeMap<RequestLabels, u64>>,
}

impl Metrics {
    /// Counts a request by resource, verb and status code.
    pub(crate) fn count_request(&self, labels: RequestLabels) {
        *self.requests.lock().unwrap_or_else(PoisonError::into_inner).entry(labels).or_default() += 1;
    }

    /// All numbers as text.
    pub(crate) fn text(
        &self,
        format: MetricsFormat,
        cache: &Cache,
        lists: &CompressedLists,
        unread: (usize, u64),
        reviews: Option<ReviewCounts>,
        policies: Option<&PolicyService>,
    ) -> String {
        let mut text = Text(Exposition::new(format));
        text.connections(self, unread);
        text.number("log_lines_left_out_total", Counter, "Lines of the log that nobody took", log_lines_left_out());
        text.number("watch_writes_total", Counter, "Chunks given to watches", self.watch_chunks.get());
        text.number("watch_bytes_total", Counter, "Bytes given to watches", self.watch_bytes.get());
        text.requests(&self.requests.lock().unwrap_or_else(PoisonError::into_inner));
        text.head("refusals_total", Counter, "Requests refused for the client's credentials or view");
        for (reason, number) in self.refusals.iter() {
            text.line("refusals_total", &[("reason", reason.label())], number);
        }
        text.lists(lists);
        if let Some(reviews) = reviews {
            text.reviews(&reviews);
        }
        text.kinds(cache, policies);
        if let Some(policies) = policies {
            text.policies(policies, cache);
        }
        text.0.finish()
    }
}

/// A text with every metric of the relay, for the manual.
#[must_use]
pub fn every_metric() -> String {
    let (metrics, cache) = (Metrics::default(), Cache::new(0));
    metrics.count_request(("services", "list", 200));
    metrics.text(
        MetricsFormat::Text,
        &cache,
        &CompressedLists::default(),
        (0, 0),
        Some(ReviewCounts::default()),
        Some(&PolicyService::new(PolicySource::Resolve, &cache)),
    )
}

/// Metrics, under names with the prefix of the relay.
struct Text(Exposition);

impl Text {
    fn head(&mut self, name: &str, kind: MetricKind, help: &str) {
        self.0.start(&full(name), kind, help);
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        self.0.line(&full(name), labels, value);
    }

    fn number(&mut self, name: &str, kind: MetricKind, help: &str, value: u64) {
        self.head(name, kind, help);
        self.line(name, &[], value);
    }

    fn connections(&mut self, metrics: &Metrics, (unread_bytes, connections_unread): (usize, u64)) {
        self.number("connections", Gauge, "Connections of clients", metrics.connections.get());
        self.number(
            "connections_max_exceeded_total",
            Counter,
            "Requests answered with 429, since the client has no place for a connection",
            metrics.connections_refused.get(),
        );
        self.number(
            "connections_displaced_total",
            Counter,
            "Connections of unknown clients, or of those with most, that gave way to others",
            metrics.connections_displaced.get(),
        );
        self.number("connections_accepted_total", Counter, "Connections accepted", metrics.connections_accepted.get());
        self.number(
            "connections_cut_total",
            Counter,
            "Connections closed because the client was idle or too slow",
            metrics.connections_cut.get(),
        );
        self.number(
            "connections_moved_total",
            Counter,
            "Connections ended by GOAWAY so that their clients move",
            metrics.connections_moved.get(),
        );
        self.number(
            "tls_handshakes_failed_total",
            Counter,
            "TLS handshakes that failed or took too long",
            metrics.handshakes_failed.get(),
        );
        self.number(
            "unread_bytes",
            Gauge,
            "Bytes of large objects, lists and events that clients have not taken yet",
            unread_bytes as u64,
        );
        self.number(
            "connections_unread_total",
            Counter,
            "Connections closed because their clients left too many of these bytes",
            connections_unread,
        );
    }

    fn lists(&mut self, lists: &CompressedLists) {
        let (count, bytes) = lists.size();
        self.number("compressed_lists", Gauge, "Compressed lists in memory", count as u64);
        self.number("compressed_lists_bytes", Gauge, "Bytes of compressed lists in memory", bytes);
        self.number(
            "compressed_lists_built_total",
            Counter,
            "Lists that were compressed",
            lists.built.load(Ordering::Relaxed),
        );
    }

    fn requests(&mut self, requests: &BTreeMap<RequestLabels, u64>) {
        self.head("requests_total", Counter, "Requests by resource, verb and status code");
        for ((resource, verb, code), number) in requests {
            let labels = [("resource", *resource), ("verb", verb), ("code", &code.to_string())];
            self.line("requests_total", &labels, number);
        }
    }

    fn reviews(&mut self, counts: &ReviewCounts) {
        self.number(
            "token_reviews_total",
            Counter,
            "Reviews of tokens that the API server was asked for",
            counts.reviews,
        );
        self.number("token_reviews_failed_total", Counter, "Reviews without an answer", counts.errors);
        self.number("token_reviews_known_total", Counter, "Requests whose token was known to be good", counts.known);
        self.number("token_reviews_stale_total", Counter, "Requests for which an older answer was used", counts.stale);
        self.number("tokens", Gauge, "Tokens that are known to be good", counts.accepted_entries as u64);
    }

    fn kinds(&mut self, cache: &Cache, policies: Option<&PolicyService>) {
        let summaries = KINDS.map(|kind| cache.summary(kind));
        type Of<T> = fn(&cproxy_relay_core::Summary) -> T;
        let gauges: [(&str, &str, Of<u64>); 7] = [
            ("objects", "Objects", |summary| summary.objects as u64),
            ("watches", "Watches of clients", |summary| summary.watchers as u64),
            ("history_events", "Events of the history", |summary| summary.events as u64),
            ("history_bytes", "Bytes of the history", |summary| summary.history_bytes as u64),
            ("resource_version", "Version up to which all changes are known", |summary| summary.version),
            ("oldest_resource_version", "Oldest version that a watch can be resumed from", |p| p.oldest_version),
            ("synced", "1 once the first list is complete", |_| 1),
        ];
        for (name, help, value) in gauges {
            self.head(name, Gauge, help);
            for (kind, summary) in KINDS.into_iter().zip(&summaries) {
                self.line(name, &[("resource", kind.plural())], summary.as_ref().map_or(0, value));
            }
        }
        type CountOf = fn(&crate::cache::Counts) -> &AtomicU64;
        let counters: [(&str, &str, CountOf); 4] = [
            ("events_total", "Events added to the history", |counts| &counts.events),
            ("upstream_lists_total", "Lists that came from the API server", |counts| &counts.lists),
            ("upstream_resets_total", "Histories given up because the API server's data went back", |counts| {
                &counts.resets
            }),
            ("unreadable_objects_total", "Objects that could not be read", |counts| &counts.unreadable),
        ];
        for (name, help, counter) in counters {
            self.head(name, Counter, help);
            for kind in KINDS {
                self.line(name, &[("resource", kind.plural())], counter(cache.counts(kind)).load(Ordering::Relaxed));
            }
        }
        self.head("upstream_silent_seconds", Gauge, "Seconds since the API server last confirmed what is known");
        for kind in KINDS {
            if let Some(seconds) = cache.silent_seconds(kind) {
                self.line("upstream_silent_seconds", &[("resource", kind.plural())], format_args!("{seconds:.3}"));
            }
        }
        for (kind, seconds) in policies.map(PolicyService::silent_seconds).unwrap_or_default() {
            self.line("upstream_silent_seconds", &[("resource", kind)], format_args!("{seconds:.3}"));
        }
    }
}

impl Text {
    fn policies(&mut self, service: &PolicyService, cache: &Cache) {
        let summary = service.policies.summary();
        let of = summary.unwrap_or_default();
        let slices = cache.summary(Kind::AddressSlices).map_or(0, |summary| summary.objects);
        let gauges = [
            ("policy_synced", "1 once the policies of pods are complete", u64::from(summary.is_some())),
            ("policy_pods", "Pods whose policies are known", of.pods as u64),
            ("policy_sets", "Address sets that policies name", of.sets as u64),
            ("policy_slices", "Slices of address sets", slices as u64),
            ("policy_oversized_rules", "Rules whose address sets exceed the bounds of one pod", of.oversized as u64),
            ("policy_watches", "Watches of policies, and of slices for other sets", of.watchers as u64),
            ("policy_resource_version", "Version up to which all changes are published", of.version),
        ];
        for (name, help, value) in gauges {
            self.number(name, Gauge, help, value);
        }
        let PolicyCounts { updates, published, unreadable, mistakes, .. } = &service.counts;
        let counters = [
            ("policy_updates_total", "Changes of Pods, Namespaces and NetworkPolicies that were applied", updates),
            ("policy_changes_total", "Policies of pods and slices that were published as changed", published),
            ("policy_unreadable_objects_total", "Objects for policies that could not be read", unreadable),
            ("policy_mistakes_total", "Mistakes in objects for policies; the log names them", mistakes),
        ];
        for (name, help, counter) in counters {
            self.number(name, Counter, help, counter.load(Ordering::Relaxed));
        }
        let seconds = service.counts.resolve_ns.load(Ordering::Relaxed) as f64 / 1e9;
        self.head("policy_resolve_seconds_total", Counter, "Time in which changes were resolved and published");
        self.line("policy_resolve_seconds_total", &[], format_args!("{seconds:.6}"));
    }
}

fn full(name: &str) -> String {
    format!("cproxy_relay_{name}")
}
