//! Credentials from a program (client.authentication.k8s.io/v1, ExecCredential).

use std::{process::Stdio, time::Duration};

use jiff::Timestamp;
use kube::config::{ExecAuthCluster, ExecConfig};
use serde::{Deserialize, Serialize};
use tokio::{process::Command, time::timeout};

use super::tls::Identity;

/// Time for the program to end. Two requests that wait for it one after the other still have time for a list.
const TIMEOUT: Duration = Duration::from_secs(25);

/// Time before the expiry at which credentials are asked for again.
const EARLY: Duration = Duration::from_secs(60);

/// Characters of the program's own message that an error shows.
const MESSAGE_CHARS_MAX: usize = 200;

/// Credentials that a program has returned.
#[derive(Clone, Debug)]
pub(super) struct ExecCredentials {
    /// Bearer token.
    pub(super) token: Option<String>,
    pub(super) identity: Option<Identity>,
    expires: Option<Timestamp>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ExecInfo<'a> {
    api_version: &'a str,
    kind: &'static str,
    spec: ExecInfoSpec<'a>,
}

#[derive(Serialize)]
struct ExecInfoSpec<'a> {
    interactive: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster: Option<&'a ExecAuthCluster>,
}

#[derive(Deserialize)]
struct ExecCredential {
    status: Option<ExecStatus>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ExecStatus {
    token: Option<String>,
    client_certificate_data: Option<String>,
    client_key_data: Option<String>,
    expiration_timestamp: Option<String>,
}

impl ExecCredentials {
    /// True if they are still good for a while.
    pub(super) fn are_fresh(&self) -> bool {
        self.are_valid_after(EARLY)
    }

    /// True if they are still good.
    pub(super) fn are_valid(&self) -> bool {
        self.are_valid_after(Duration::ZERO)
    }

    fn are_valid_after(&self, time: Duration) -> bool {
        self.expires.is_none_or(|expires| Timestamp::now().checked_add(time).is_ok_and(|then| then < expires))
    }

    fn read(json: &[u8]) -> Result<Self, String> {
        let credential: ExecCredential =
            serde_json::from_slice(json).map_err(|error| format!("its output is no ExecCredential: {error}"))?;
        let status = credential.status.ok_or("its ExecCredential has no status")?;
        let token = status.token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        let identity = match (status.client_certificate_data, status.client_key_data) {
            (Some(certificate), Some(key)) => {
                Some(Identity { certificate: certificate.into_bytes(), key: key.into_bytes() })
            }
            (None, None) => None,
            _ => return Err("its ExecCredential needs both clientCertificateData and clientKeyData".to_owned()),
        };
        if token.as_ref().is_some_and(|token| token.contains(|character: char| character.is_control())) {
            return Err("the token of its ExecCredential has a line feed or another control character".to_owned());
        }
        if token.is_none() && identity.is_none() {
            return Err("its ExecCredential has neither a token nor a client certificate".to_owned());
        }
        let expires = status.expiration_timestamp.map(|text| text.parse()).transpose();
        let expires = expires.map_err(|error| format!("expirationTimestamp of its ExecCredential: {error}"))?;
        Ok(Self { token, identity, expires })
    }
}

/// Runs the program of a kubeconfig's user.
///
/// # Errors
/// A message that names the program.
pub(super) async fn run(config: &ExecConfig) -> Result<ExecCredentials, String> {
    let program = config.command.as_deref().ok_or("its user's exec has no command")?;
    let named = |message: String| format!("exec plugin {program}: {message}");
    let api_version = config.api_version.as_deref().unwrap_or("client.authentication.k8s.io/v1");
    let spec = ExecInfoSpec { interactive: false, cluster: config.cluster.as_ref() };
    let info = serde_json::to_string(&ExecInfo { api_version, kind: "ExecCredential", spec });
    let mut command = Command::new(program);
    command.args(config.args.iter().flatten()).env("KUBERNETES_EXEC_INFO", info.map_err(|error| error.to_string())?);
    for variable in config.env.iter().flatten() {
        if let (Some(name), Some(value)) = (variable.get("name"), variable.get("value")) {
            command.env(name, value);
        }
    }
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(TIMEOUT, command.output()).await;
    let output = output.map_err(|_| named(format!("no answer within {TIMEOUT:?}")))?;
    let output = output.map_err(|error| named(error.to_string()))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        let message: String = message.trim().chars().take(MESSAGE_CHARS_MAX).collect();
        return Err(named(format!("{}: {message}", output.status)));
    }
    ExecCredentials::read(&output.stdout).map_err(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> ExecConfig {
        ExecConfig {
            command: Some("sh".to_owned()),
            args: Some(vec!["-c".to_owned(), script.to_owned()]),
            ..ExecConfig::default()
        }
    }

    #[tokio::test]
    async fn a_token_is_fresh_until_shortly_before_its_expiry() {
        let print = |status: &str| shell(&format!("printf '%s' '{{\"status\":{status}}}'"));
        let for_ever = run(&print(r#"{"token":"a\n"}"#)).await.unwrap();
        assert!(for_ever.are_fresh() && for_ever.token.as_deref() == Some("a"));
        let at = |seconds| Timestamp::now().checked_add(Duration::from_secs(seconds)).unwrap();
        let expires = async |seconds| {
            let status = format!(r#"{{"token":"a","expirationTimestamp":"{}"}}"#, at(seconds));
            let credentials = run(&print(&status)).await.unwrap();
            (credentials.are_fresh(), credentials.are_valid())
        };
        assert_eq!(expires(600).await, (true, true));
        assert_eq!(expires(30).await, (false, true));
        assert_eq!(expires(0).await, (false, false));
    }

    #[tokio::test(start_paused = true)]
    async fn a_program_that_hangs_is_ended() {
        let error = run(&shell("exec sleep 1000")).await.unwrap_err();
        assert_eq!(error, "exec plugin sh: no answer within 25s");
    }

    #[tokio::test]
    async fn the_program_learns_that_nobody_can_be_asked() {
        let script = r#"case $KUBERNETES_EXEC_INFO in *'"interactive":false'*) ;; *) exit 1;; esac
                        echo '{"status":{"clientCertificateData":"c","clientKeyData":"k"}}'"#;
        let credentials = run(&shell(script)).await.unwrap();
        assert_eq!(credentials.identity, Some(Identity { certificate: b"c".to_vec(), key: b"k".to_vec() }));
    }

    #[tokio::test]
    async fn errors_name_the_program() {
        for (script, words) in [
            ("echo no login >&2; exit 3", "exit status: 3: no login"),
            ("echo '<html>'", "no ExecCredential"),
            ("echo '{}'", "no status"),
            ("echo '{\"status\":{}}'", "neither a token"),
            (r#"printf '%s' '{"status":{"token":"a\nb"}}'"#, "line feed"),
            ("echo '{\"status\":{\"clientKeyData\":\"k\"}}'", "needs both"),
            ("echo '{\"status\":{\"token\":\"a\",\"expirationTimestamp\":\"soon\"}}'", "expirationTimestamp"),
        ] {
            let error = run(&shell(script)).await.unwrap_err();
            assert!(error.starts_with("exec plugin sh: ") && error.contains(words), "{error}");
        }
        let missing = ExecConfig { command: Some("/no/such/program".to_owned()), ..ExecConfig::default() };
        assert!(run(&missing).await.unwrap_err().starts_with("exec plugin /no/such/program: "));
    }
}
