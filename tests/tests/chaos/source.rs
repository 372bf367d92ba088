//! Where the agent gets objects from: a control plane, which can have trouble, or a directory of manifests.

use std::{
    fs,
    path::{Path, PathBuf},
};

use cproxy_tests::{
    manifest,
    nameserver::program_with_nameserver,
    process::cproxy,
    random,
    sandbox::Sandbox,
    storm::{addresses::CROWD_LARGEST, sets::MANY},
};
use serde_json::Value;

use crate::{
    cluster::{Cluster, FRONTENDS_BESIDE, NAMESERVER},
    held,
};

/// Source of the objects.
pub(crate) enum Source<'s> {
    Cluster(Box<Cluster<'s>>),
    Manifests(&'s Sandbox),
}

/// Limits on the objects.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// Probability in percent, and limit on the number of backends, of a Service's random sets.
    pub(crate) sizes: &'static [(usize, u32)],
    /// Largest number of backends.
    pub(crate) many: u32,
    /// Number of crowds of other Services, and of the backends of their largest.
    pub(crate) crowds: usize,
    pub(crate) crowd_largest: u32,
    /// Frontends of Services that do not change.
    pub(crate) frontends_beside: usize,
}

/// A slice has at most 1,000 endpoints, and the control plane needs time for each.
const OF_CLUSTER: Limits = Limits {
    sizes: &[(60, 5), (30, 50), (10, 300)],
    many: 300,
    crowds: 4,
    crowd_largest: 500,
    frontends_beside: FRONTENDS_BESIDE + held::FRONTENDS,
};

const OF_MANIFESTS: Limits = Limits {
    sizes: &[(60, 5), (25, 100), (15, MANY)],
    many: MANY,
    crowds: 6,
    crowd_largest: CROWD_LARGEST,
    frontends_beside: held::FRONTENDS,
};

/// Number of crowds in long runs with manifests.
const CROWDS_IN_SOAK: usize = 16;

impl<'s> Source<'s> {
    pub(crate) fn limits(&self) -> Limits {
        match self {
            Self::Cluster(_) => OF_CLUSTER,
            Self::Manifests(_) if random::is_soak() => Limits { crowds: CROWDS_IN_SOAK, ..OF_MANIFESTS },
            Self::Manifests(_) => OF_MANIFESTS,
        }
    }

    /// The control plane.
    ///
    /// # Panics
    /// When there are only manifests, which have no trouble.
    pub(crate) fn cluster(&mut self) -> &mut Cluster<'s> {
        match self {
            Self::Cluster(cluster) => cluster,
            Self::Manifests(_) => unreachable!("manifests have no trouble"),
        }
    }

    /// Adds the objects of one name, or replaces them if they are there.
    pub(crate) fn write(&self, name: &str, objects: impl IntoIterator<Item = Value>, are_there: bool) {
        match self {
            Self::Cluster(cluster) if are_there => cluster.writer.replace(objects),
            Self::Cluster(cluster) => cluster.writer.create(objects),
            Self::Manifests(sandbox) => drop(manifest::write(&sandbox.manifest_dir(), &file(name), objects)),
        }
    }

    /// Deletes the objects of one name.
    pub(crate) fn delete(&self, name: &str, objects: impl IntoIterator<Item = Value>) {
        match self {
            Self::Cluster(cluster) => cluster.writer.delete(objects),
            Self::Manifests(sandbox) => fs::remove_file(sandbox.manifest_dir().join(file(name))).unwrap(),
        }
    }

    /// The table that the objects give, as rows of `get services`.
    pub(crate) fn resolved(&self) -> Value {
        match self {
            Self::Cluster(cluster) => cluster.resolved(),
            Self::Manifests(sandbox) => {
                let directory = sandbox.manifest_dir().display().to_string();
                cproxy(sandbox, &["resolve", "--manifests", &directory, "-o", "json"]).json()
            }
        }
    }

    /// An agent's program, with the nameserver of the cluster if there is one.
    pub(crate) fn program(&self, name: &str, program: &Path) -> PathBuf {
        match self {
            Self::Cluster(cluster) => program_with_nameserver(cluster.sandbox, name, program, NAMESERVER),
            Self::Manifests(_) => program.to_owned(),
        }
    }

    /// Arguments of an agent that follows it.
    pub(crate) fn arguments(&self) -> [PathBuf; 2] {
        match self {
            Self::Cluster(cluster) => ["--kubeconfig".into(), cluster.kubeconfig()],
            Self::Manifests(sandbox) => ["--manifests".into(), sandbox.manifest_dir()],
        }
    }
}

fn file(name: &str) -> String {
    format!("{name}.json")
}
