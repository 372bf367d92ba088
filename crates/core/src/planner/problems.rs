//! Problems of Services.

use std::{collections::BTreeMap, sync::Arc};

use crate::{Problem, ServiceName};

/// Problems of Services in the table.
#[derive(Debug, Default)]
pub(super) struct Problems {
    by_service: BTreeMap<Arc<ServiceName>, Vec<Problem>>,
    /// Raised whenever the problems may have changed.
    pub(super) revision: u64,
}

impl Problems {
    /// Replaces all problems of a Service.
    pub(super) fn replace(&mut self, service: &Arc<ServiceName>, problems: Vec<Problem>) {
        self.revision += u64::from(self.by_service.remove(service).is_some() || !problems.is_empty());
        if !problems.is_empty() {
            self.by_service.insert(service.clone(), problems);
        }
    }

    /// Adds a problem of a Service, once if several frontends in a row have it.
    pub(super) fn add(&mut self, service: &Arc<ServiceName>, message: String) {
        let problem = Problem::new(format_args!("Service {service}"), "", message);
        let problems = self.by_service.entry(service.clone()).or_default();
        if problems.last() != Some(&problem) {
            problems.push(problem);
        }
        self.revision += 1;
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.by_service.values().flatten()
    }
}
