//! The agent's part of `cproxy explain`: what it knows of a Service, and what its source has of one that it does not
//! serve.

use std::{path::PathBuf, sync::Arc, time::Duration};

use cproxy_core::{
    Frontend, Problem, ServiceName, Skipped, Store, TablePlanner, api::Service, desired_rows, explain_stored,
    object_name, served_spec, services_at, unserved_node_port, won_rows,
};
use cproxy_wire::{ApiClient, service_named, service_with_cluster_ip};

use super::{
    last_changes::LastChanges,
    source::{Followed, SourceStatus},
};
use crate::{
    manifests::{Files, ParseOptions, WholeObject},
    report::{AgentReport, EXTERNAL_NAME, EndpointRow, FrontendRow, HEADLESS, ServiceReport, UnservedReport},
    target::Target,
};

/// Time for the source's answer: less than a command waits for the agent's.
const SOURCE_TIMEOUT: Duration = Duration::from_millis(1500);

/// Maximum number of Services in a report.
const SERVICES_MAX: usize = 16;

/// State that the agent explains destinations from.
pub(super) struct ExplainContext<'a> {
    pub(super) store: &'a Store,
    pub(super) planner: &'a TablePlanner,
    /// All present problems.
    pub(super) problems: Vec<Problem>,
    pub(super) changes: &'a LastChanges,
    pub(super) source: &'a SourceStatus,
}

impl ExplainContext<'_> {
    /// Report about a destination, from the agent's memory alone.
    pub(super) fn report(&self, target: &Target) -> AgentReport {
        AgentReport {
            services: self.services(target).iter().map(|name| self.service(name)).collect(),
            unserved: self.unserved_node_port(target),
            source: self.source.report(),
            unread: self.store.unread().iter().map(ToString::to_string).collect(),
            node_name: self.store.node_name().map(str::to_owned),
            has_node: self.store.has_node() == Some(true),
            synced_seconds: self.changes.synced_seconds(),
        }
    }

    /// The Service whose node port would be called if an address of this node were known.
    fn unserved_node_port(&self, target: &Target) -> Option<UnservedReport> {
        let Target::Frontend(Frontend { port, protocol, .. }) = target else { return None };
        let (service, code, reason) = unserved_node_port(self.store, *port, *protocol)?;
        Some(UnservedReport { service: service.to_string(), code: code.to_owned(), reason })
    }

    /// The Service of that name; or those that have the address, beginning with those that serve it.
    fn services(&self, target: &Target) -> Vec<ServiceName> {
        let address = match target {
            Target::Service(name, _) => {
                return self.store_of(name).service_row(name).map(|_| name.clone()).into_iter().collect();
            }
            Target::Address(address) | Target::Frontend(Frontend { address, .. }) => *address,
        };
        let stores = [self.store, self.planner.internal()].into_iter();
        let serves = |name: &ServiceName| {
            let rows =
                desired_rows(self.store_of(name), name).into_iter().filter(|row| row.frontend.address == address);
            rows.into_iter().any(|row| self.planner.service_of(row.frontend) == Some(name))
        };
        let all = stores.flat_map(|store| services_at(store, address)).cloned();
        let (mut names, others): (Vec<_>, Vec<_>) = all.partition(serves);
        names.extend(others);
        names.truncate(SERVICES_MAX);
        names
    }

    fn store_of(&self, name: &ServiceName) -> &Store {
        self.planner.store_of(name, self.store)
    }

    fn service(&self, name: &ServiceName) -> ServiceReport {
        let owner_of = |frontend| self.planner.service_of(frontend).cloned();
        let store = self.store_of(name);
        let wanted = won_rows(store, &owner_of, desired_rows(store, name));
        let slices: Vec<_> = store.slices(name).map(|(slice, _)| format!("EndpointSlice {slice}")).collect();
        let object = format!("Service {name}");
        let is_about = |problem: &&Problem| problem.object == object || slices.contains(&problem.object);
        let problems = self.problems.iter().filter(is_about);
        ServiceReport {
            service: name.to_string(),
            frontends: wanted.iter().map(FrontendRow::from).collect(),
            slices: slices.len(),
            endpoints: explain_stored(store, &owner_of, name).iter().map(EndpointRow::from).collect(),
            problems: problems.map(ToString::to_string).collect(),
            last_change: self.changes.of(name),
        }
    }
}

/// Question to the source for a Service that the agent does not serve.
pub(super) enum ServerQuery {
    ApiServer(Arc<ApiClient>),
    Manifests(Vec<PathBuf>),
}

impl ServerQuery {
    pub(super) fn to(source: &SourceStatus) -> Self {
        match &source.followed {
            Followed::ApiServer(client) => Self::ApiServer(client.clone()),
            Followed::Manifests(paths) => Self::Manifests(paths.iter().map(PathBuf::from).collect()),
        }
    }

    /// Why the source's Service of that name or ClusterIP is not served. `None` without such a Service, or if the
    /// source does not answer in time.
    pub(super) async fn unserved(self, target: &Target) -> Option<UnservedReport> {
        let service = match self {
            Self::ApiServer(client) => {
                tokio::time::timeout(SOURCE_TIMEOUT, service_of(&client, target)).await.ok().flatten()?
            }
            Self::Manifests(paths) => {
                let Target::Service(name, _) = target.clone() else { return None };
                tokio::task::spawn_blocking(move || service_in(&paths, name)).await.ok().flatten()?
            }
        };
        let name = object_name(&service.metadata)?.to_string();
        let (code, reason) = unserved_because(&service);
        Some(UnservedReport { service: name, code: code.to_owned(), reason })
    }
}

/// Why a Service is not served: the rule's name for scripts, and its text.
fn unserved_because(service: &Service) -> (&'static str, String) {
    match served_spec(service) {
        Err(skipped @ Skipped::Headless) => {
            (HEADLESS, format!("{skipped}: its name in DNS gives the addresses of its pods, which are called directly"))
        }
        Err(skipped @ Skipped::ExternalName) => {
            (EXTERNAL_NAME, format!("{skipped}: its name in DNS leads to another name, without an address of its own"))
        }
        Err(skipped) => ("not-served", skipped.to_string()),
        Ok(spec) if !spec.ports.is_empty() && spec.ports.iter().all(|port| port.protocol == "SCTP") => {
            ("sctp", "all its ports are SCTP, which cproxy does not translate".to_owned())
        }
        Ok(_) => (
            "not-received",
            "the agent has not received it yet, or has a problem with it: cproxy get problems, and its log".to_owned(),
        ),
    }
}

/// The API server's Service of that name or ClusterIP.
async fn service_of(client: &ApiClient, target: &Target) -> Option<Service> {
    let service = match target {
        Target::Service(name, _) => service_named(client, name).await,
        Target::Address(address) | Target::Frontend(Frontend { address, .. }) => {
            service_with_cluster_ip(client, *address).await
        }
    };
    service.inspect_err(|error| tracing::debug!("the API server does not tell of {target}: {error}")).ok().flatten()
}

/// Service of that name in the manifests.
fn service_in(paths: &[PathBuf], name: ServiceName) -> Option<Service> {
    let options = ParseOptions { whole_service: Some(name), ..ParseOptions::default() };
    let files = Files::read(paths, options).ok()?;
    let objects = files.whole_objects();
    objects.values().find_map(|object| match object {
        WholeObject::Service(service) => Some(service.clone()),
        WholeObject::Slice(_) => None,
    })
}
