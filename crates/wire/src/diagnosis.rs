//! Diagnosis of the way to the API servers, for `cproxy check`: the steps that a request of the agent takes, with the
//! settings that the agent has, each with its own error.
//!
//! It is bounded in time, and sends a few short requests over one connection. Nothing secret is part of a finding.

pub(crate) mod access_review;
mod clock;
mod credentials;
mod expiry;
pub(crate) mod finding;
mod server_probe;

use std::{path::Path, sync::Arc, time::Duration};

use cproxy_network::SocketSetup;
use jiff::Timestamp;
use tokio::time::timeout;

use self::{
    access_review::{AccessReview, RIGHTS, Right},
    finding::{Finding, Grade},
    server_probe::{ReachedServer, ServerProbe},
};
use crate::{
    credentials::{
        configuration::{ApiServer, configure},
        exec_plugin,
    },
    error_text::chain,
    transport::connector::Connector,
};

/// Limit on the whole diagnosis. It leaves an exec plugin less time than the agent does.
const TIME_MAX: Duration = Duration::from_secs(30);

/// Hint where the address of the API server is that of the pod's environment.
const CLUSTER_IP: &str = "; KUBERNETES_SERVICE_HOST is usually a ClusterIP, which cproxy does not use itself: pass \
                          --apiserver with the API server's real address";

/// Follows the way of a request to the API servers and back. Steps behind one that fails are left out. Names are
/// resolved by the files below `root`, as they are in another container when `root` is `/proc/PID/root`.
pub async fn diagnose(options: &ApiServer, node_name: Option<&str>, setup: SocketSetup, root: &Path) -> Vec<Finding> {
    let mut findings = Vec::new();
    let connector = Connector::new(setup).with_root(root);
    if timeout(TIME_MAX, walk(options, node_name, connector, &mut findings)).await.is_err() {
        let detail = format!("no complete answer within {TIME_MAX:?}: the API server, or an exec plugin, is too slow");
        findings.push(Finding::required("api_time", Grade::Missing, detail));
    }
    findings
}

async fn walk(options: &ApiServer, node_name: Option<&str>, connector: Connector, findings: &mut Vec<Finding>) {
    let mut configuration = match configure(options).await {
        Ok(configuration) => configuration,
        Err(error) => return findings.push(Finding::required("api_server", Grade::Missing, error)),
    };
    let mut expires = None;
    if let Some(exec) = configuration.exec.clone() {
        match exec_plugin::run(&exec).await {
            Ok(new) => {
                expires = new.expires();
                if let Err(error) = configuration.add(new) {
                    return findings.push(Finding::required("credentials", Grade::Missing, error));
                }
            }
            Err(error) => return findings.push(Finding::required("credentials", Grade::Missing, error)),
        }
    }
    let local = Timestamp::now().as_second();
    let probe = match ServerProbe::new(Arc::new(configuration), connector) {
        Ok(probe) => probe,
        Err(error) => return findings.push(Finding::required("api_server", Grade::Missing, error)),
    };
    findings.extend(credentials::expiries(probe.configuration(), expires, local));
    let hint = if options.kubeconfig.is_none() && options.addresses.is_empty() { CLUSTER_IP } else { "" };
    let Some(reached) = find_server(&probe, hint, local, findings).await else { return };
    if ask_who(&probe, &reached, findings).await {
        ask_rights(&probe, &reached, node_name, findings).await;
    }
}

/// First server that can be reached, in the order of preference.
async fn find_server(
    probe: &ServerProbe,
    hint: &str,
    local: i64,
    findings: &mut Vec<Finding>,
) -> Option<ReachedServer> {
    let mut failures = Vec::new();
    let mut invalid = None;
    for address in &probe.configuration().servers {
        match probe.reach(address).await {
            Ok(reached) => {
                findings.push(server_line(&reached, &failures));
                findings.extend(reached.certificate.map(|times| expiry::of_server(times, local)));
                return Some(reached);
            }
            Err(failure) => {
                failures.push(format!("{address}: {}", failure.text));
                invalid = invalid.or(failure.invalid.map(|times| (address, times)));
            }
        }
    }
    findings.push(Finding::required("api_server", Grade::Missing, format!("{}{hint}", failures.join("; "))));
    if let Some((address, times)) = invalid {
        findings.push(expiry::of_server(times, local));
        findings.push(clock::unverified(local, probe.date_of_unverified(address).await));
    }
    None
}

fn server_line(reached: &ReachedServer, failures: &[String]) -> Finding {
    let answered = format!("{} answered after {} ms", reached.address, reached.time.as_millis());
    match failures {
        [] => Finding::required("api_server", Grade::Ok, answered),
        failures => {
            Finding::required("api_server", Grade::Degraded, format!("{answered}; not used: {}", failures.join("; ")))
        }
    }
}

/// Asks whom the server takes the agent for. Returns whether it accepts the credentials.
async fn ask_who(probe: &ServerProbe, reached: &ReachedServer, findings: &mut Vec<Finding>) -> bool {
    let sent_at = Timestamp::now().as_second();
    let response = match reached.call(probe.configuration(), credentials::who_am_i()).await {
        Ok(response) => response,
        Err(error) => {
            findings.push(Finding::required("credentials", Grade::Missing, format!("no answer: {}", chain(&error))));
            return false;
        }
    };
    findings.push(clock::compared(sent_at, Timestamp::now().as_second(), clock::date(response.headers())));
    let line = credentials::line(probe.configuration(), &response);
    let is_accepted = line.grade != Grade::Missing;
    findings.push(line);
    is_accepted
}

async fn ask_rights(
    probe: &ServerProbe,
    reached: &ReachedServer,
    node_name: Option<&str>,
    findings: &mut Vec<Finding>,
) {
    for right in RIGHTS {
        // Without a name, the agent does not read Nodes.
        if !right.is_required && node_name.is_none() {
            continue;
        }
        let name = node_name.filter(|_| !right.is_required);
        match reached
            .call(probe.configuration(), right.request(name))
            .await
            .map(|response| AccessReview::read(&response))
        {
            Ok(AccessReview::NotReviewed(reason)) => {
                let detail = format!(
                    "the server does not say ({reason}), as a relay does not: `source` has what an agent sees there"
                );
                return findings.push(Finding::optional("rights", Grade::Ok, detail));
            }
            Ok(review) => findings.push(right_line(&right, &review)),
            Err(error) => findings.push(right_line(&right, &AccessReview::Failed(chain(&error)))),
        }
    }
}

fn right_line(right: &Right, review: &AccessReview) -> Finding {
    let name = format!("{}_{}", right.verb, right.resource);
    let (grade, detail) = match review {
        AccessReview::Allowed => (Grade::Ok, "permitted".to_owned()),
        AccessReview::Denied if right.is_required => (Grade::Missing, right.remedy()),
        AccessReview::Denied => {
            let loss = "zone hints have no effect, and node ports need --node-ip";
            (Grade::Degraded, format!("{}; without it {loss}", right.remedy()))
        }
        AccessReview::NotReviewed(reason) | AccessReview::Failed(reason) => {
            (Grade::Degraded, format!("the server does not say: {reason}"))
        }
    };
    Finding { is_required: right.is_required, ..Finding::required(&name, grade, detail) }
}
