//! The Go program that asks the engines.

use std::{
    env,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use serde_json::Value;

use crate::{cluster::Cluster, verdicts::Sides};

/// Variable with the directory of the program.
const VARIABLE: &str = "CPROXY_POLICY_ENGINES";

pub(crate) struct Engines {
    program: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// Verdicts about one traffic.
pub(crate) struct Verdicts {
    /// Of both sides together.
    pub(crate) kube_network_policies: bool,
    /// Of each side.
    pub(crate) cyclonus: Sides,
}

impl Engines {
    pub(crate) fn start() -> Self {
        let directory = env::var_os(VARIABLE).unwrap_or_else(|| panic!("{VARIABLE} is not set"));
        let mut command = Command::new(Path::new(&directory).join("policies"));
        let mut program = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (program.stdin.take().unwrap(), program.stdout.take().unwrap());
        Self { program, input, output: BufReader::new(output) }
    }

    /// Verdicts in the order of the cluster's traffic.
    pub(crate) fn verdicts(&mut self, cluster: &Cluster) -> Vec<Verdicts> {
        let json = cluster.json();
        writeln!(self.input, "{json}").unwrap_or_else(|error| panic!("the engines have failed: {error}"));
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        let answer: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?} for {json}"));
        let list = |name: &str| answer[name].as_array().cloned().unwrap_or_default();
        let (first, second) = (list("kubeNetworkPolicies"), list("cyclonus"));
        assert_eq!((first.len(), second.len()), (cluster.traffic.len(), cluster.traffic.len()), "{line}");
        let boolean = |value: &Value| value.as_bool().unwrap();
        let verdicts = first.iter().zip(&second).map(|(both, sides)| Verdicts {
            kube_network_policies: boolean(both),
            cyclonus: Sides { egress: boolean(&sides["egress"]), ingress: boolean(&sides["ingress"]) },
        });
        verdicts.collect()
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        drop(self.program.kill());
        drop(self.program.wait());
    }
}
