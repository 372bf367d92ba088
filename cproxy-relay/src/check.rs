//! `cproxy-relay check`: can the relay run with these settings, without starting it?

use anyhow::{Result, bail};
use bytes::Bytes;
use clap::ValueEnum;
use cproxy_network::SocketSetup;
use cproxy_policy::served;
use cproxy_relay_core::KINDS;
use cproxy_wire::{AccessReview, ApiClient, ApiServer, Right, Transport};
use http::{Request, StatusCode, header::ACCEPT};
use serde_json::{Value, json};

use crate::{
    config::{Authentication, Config, PolicySource},
    listen::{
        address::ListenAddress,
        guest_sockets::{Found, GuestSockets},
        listener,
        tls::ServerTls,
    },
    output::print,
    run::read_views,
    upstream,
};

/// Format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Aligned columns
    Table,
    /// An array of objects
    Json,
}

/// One requirement.
struct Requirement {
    name: String,
    /// Finding, or the fault and its remedy.
    result: Result<String, String>,
}

/// Checks the settings and prints the requirements.
///
/// # Errors
/// One is not met.
pub(crate) async fn run(config: &Config, format: Format) -> Result<()> {
    let requirements = requirements(config).await;
    match format {
        Format::Table => print(&table(&requirements))?,
        Format::Json => print(&format!("{}\n", serde_json::to_string_pretty(&json(&requirements))?))?,
    }
    let missing: Vec<_> = requirements.iter().filter(|one| one.result.is_err()).map(|one| one.name.as_str()).collect();
    let verb = if missing.len() == 1 { "is" } else { "are" };
    let (count, all) = (missing.len(), requirements.len());
    if missing.is_empty() {
        return Ok(());
    }
    bail!("cannot run: {count} of {all} checks {verb} missing ({})", missing.join(", "))
}

async fn requirements(config: &Config) -> Vec<Requirement> {
    let mut all = Vec::new();
    let mut add = |name: &str, result| all.push(Requirement { name: name.to_owned(), result });
    let tls = config.tls.clone().map(ServerTls::read).transpose();
    add(
        "tls",
        match &tls {
            Ok(Some(_)) => Ok("the certificate and its key can be used".to_owned()),
            Ok(None) => Ok("off: only local listeners".to_owned()),
            Err(error) => Err(error.to_string()),
        },
    );
    let views = read_views(config.views.as_deref()).map_err(|error| format!("{error:#}"));
    add(
        "views",
        views.map(|_| match &config.views {
            Some(path) => format!("{} is valid", path.display()),
            None => "none: each client sees everything".to_owned(),
        }),
    );
    if config.listen.is_empty() {
        add("listen", Err("none is given: pass --listen, such as unix:///run/cproxy-relay.sock".to_owned()));
    }
    for address in &config.listen {
        let opened =
            listener::open(address, None).map_err(|error| format!("{address}: {error}: choose another --listen"));
        let result = match address {
            ListenAddress::Guests(pattern) => match GuestSockets::new(pattern.clone()).find() {
                Found { problem: Some(problem), .. } => Err(format!("{problem}: check --listen {address}")),
                found => Ok(format!("{address}: VMs that match now: {}", found.vm_sockets.len())),
            },
            _ => opened.map(|_| format!("{address} can be bound")),
        };
        add("listen", result);
    }
    let server = ApiServer { kubeconfig: config.kubeconfig.clone(), ..ApiServer::default() };
    match upstream::configuration(&server).await {
        Ok(configuration) => {
            let client = ApiClient::new(server, configuration, SocketSetup::new(|_| Ok(())));
            all.extend(of_api_server(&client, config).await);
        }
        Err(error) => add("api_server", Err(error.to_string())),
    }
    all
}

/// Group and resource of the kinds from which policies are resolved.
const FOLLOWED_FOR_POLICIES: [(&str, &str); 3] =
    [("", "pods"), ("", "namespaces"), ("networking.k8s.io", "networkpolicies")];

async fn of_api_server(client: &ApiClient, config: &Config) -> Vec<Requirement> {
    let version = version(client).await;
    let is_reached = version.is_ok();
    let mut all = vec![Requirement { name: "api_server".to_owned(), result: version }];
    if !is_reached {
        return all;
    }
    if config.policies == Some(PolicySource::Follow) {
        // Rights at another relay are its views', which it says when it is asked for objects.
        all.push(Requirement { name: "followed_relay".to_owned(), result: serves_policies(client).await });
        return all;
    }
    let of_policies = config.policies.map_or(&[][..], |_| &FOLLOWED_FOR_POLICIES);
    let followed = KINDS.map(|kind| (kind.group(), kind.plural()));
    for &(group, plural) in followed.iter().chain(of_policies) {
        for verb in ["list", "watch"] {
            let result = is_allowed(client, Right::new(verb, group, plural)).await;
            all.push(Requirement { name: format!("{verb}_{plural}"), result });
        }
    }
    if config.authentication == Authentication::TokenReview {
        let result = is_allowed(client, Right::new("create", "authentication.k8s.io", "tokenreviews")).await;
        all.push(Requirement { name: "create_tokenreviews".to_owned(), result });
    }
    all
}

/// Whether the server is a relay that serves policies.
async fn serves_policies(client: &ApiClient) -> Result<String, String> {
    let path = format!("/apis/{}", served::API_VERSION);
    match get(client, &path).await {
        Ok(_) => Ok("a relay that serves network policies".to_owned()),
        Err(error) => Err(format!("{path}: {error}; --policies=follow needs a relay with --policies")),
    }
}

async fn version(client: &ApiClient) -> Result<String, String> {
    let version = get(client, "/version").await?;
    let git_version = version.get("gitVersion").and_then(Value::as_str).unwrap_or("an unknown version");
    Ok(format!("Kubernetes {git_version}"))
}

async fn is_allowed(client: &ApiClient, right: Right) -> Result<String, String> {
    let response = client.call(right.request(None)).await.map_err(|error| error.to_string())?;
    match AccessReview::read(&response) {
        AccessReview::Allowed => Ok("permitted".to_owned()),
        AccessReview::Denied => Err(right.remedy()),
        AccessReview::NotReviewed(reason) | AccessReview::Failed(reason) => Err(reason),
    }
}

/// Sends a request and reads the response as JSON.
async fn get(client: &ApiClient, path: &str) -> Result<Value, String> {
    let request = Request::get(path).header(ACCEPT, "application/json").body(Bytes::new());
    let response = client.call(request.map_err(|error| error.to_string())?).await.map_err(|error| error.to_string())?;
    let code = response.status();
    if code == StatusCode::UNAUTHORIZED {
        return Err(format!("{} does not accept the credentials (401)", Transport::server(client)));
    }
    let body: Value = serde_json::from_slice(response.body()).map_err(|error| format!("its response: {error}"))?;
    if code.is_success() {
        return Ok(body);
    }
    let message = body.get("message").and_then(Value::as_str).unwrap_or_default();
    Err(format!("{code}: {}", cproxy_core::printable(message)))
}

fn table(requirements: &[Requirement]) -> String {
    let width = requirements.iter().map(|one| one.name.len()).max().unwrap_or(0);
    let line = |Requirement { name, result }: &Requirement| {
        let (state, detail) = match result {
            Ok(detail) => ("ok", detail),
            Err(detail) => ("missing", detail),
        };
        format!("{state:<8}{name:<width$}  {}\n", detail.replace('\n', " "))
    };
    requirements.iter().map(line).collect()
}

fn json(requirements: &[Requirement]) -> Value {
    let one = |Requirement { name, result }: &Requirement| {
        let (state, detail) = match result {
            Ok(detail) => ("ok", detail),
            Err(detail) => ("missing", detail),
        };
        json!({"name": name, "state": state, "required": true, "detail": detail})
    };
    requirements.iter().map(one).collect()
}
