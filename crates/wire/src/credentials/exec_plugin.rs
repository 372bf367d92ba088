//! Credentials from a program (client.authentication.k8s.io/v1, ExecCredential).

use std::{
    io,
    pin::pin,
    process::{Output, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use jiff::Timestamp;
use kube::config::{ExecAuthCluster, ExecConfig};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    process::Command,
    time::timeout,
    try_join,
};

use crate::{
    credentials::setup_error::{ExecError, Reason},
    error_text::one_line,
    located::read_json,
    transport::tls::Identity,
};

/// Time for the program to end. Two requests that wait for it one after the other still have time for a list.
const TIMEOUT: Duration = Duration::from_secs(25);

/// Time for the rest of the output after the program has ended.
const REST_TIME_MAX: Duration = Duration::from_millis(500);

/// Longest output.
const OUTPUT_BYTES_MAX: u64 = 1 << 20;

/// Time before the expiry at which credentials are asked for again.
const EARLY: Duration = Duration::from_secs(60);

/// Characters of the program's own message that an error shows.
const MESSAGE_CHARS_MAX: usize = 200;

/// Whether no program is run any more.
static IS_REFUSED: AtomicBool = AtomicBool::new(false);

/// Runs no program from now on, because this process has limited the system calls of all that it starts.
pub fn refuse() {
    IS_REFUSED.store(true, Ordering::Relaxed);
}

/// Credentials that a program has returned.
#[derive(Clone, Debug)]
pub(crate) struct ExecCredentials {
    /// Bearer token.
    pub(crate) token: Option<String>,
    pub(crate) identity: Option<Identity>,
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
    /// Time at which they expire, if the program has named one.
    pub(crate) fn expires(&self) -> Option<Timestamp> {
        self.expires
    }

    /// True if they are still good for a while.
    pub(crate) fn are_fresh(&self) -> bool {
        self.are_valid_after(EARLY)
    }

    /// True if they are still good.
    pub(crate) fn are_valid(&self) -> bool {
        self.are_valid_after(Duration::ZERO)
    }

    fn are_valid_after(&self, time: Duration) -> bool {
        self.expires.is_none_or(|expires| Timestamp::now().checked_add(time).is_ok_and(|then| then < expires))
    }

    fn read(json: &[u8]) -> Result<Self, ExecError> {
        let credential: ExecCredential = read_json(json).map_err(ExecError::Output)?;
        let status = credential.status.ok_or(ExecError::NoStatus)?;
        let token = status.token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        let identity = match (status.client_certificate_data, status.client_key_data) {
            (Some(certificate), Some(key)) => {
                Some(Identity { certificate: certificate.into_bytes(), key: key.into_bytes() })
            }
            (None, None) => None,
            _ => return Err(ExecError::HalfIdentity),
        };
        if token.as_ref().is_some_and(|token| token.contains(|character: char| character.is_control())) {
            return Err(ExecError::TokenCharacter);
        }
        if token.is_none() && identity.is_none() {
            return Err(ExecError::Nothing);
        }
        let expires = status.expiration_timestamp.map(|text| text.parse()).transpose();
        let expires = expires.map_err(ExecError::Expiration)?;
        Ok(Self { token, identity, expires })
    }
}

/// Shortest word that a program prints which may be a secret.
const PRINTED_BYTES_MIN: usize = 8;

/// Fields and kinds in the output of a program.
const PRINTED_NAMES: [&str; 6] =
    ["apiVersion", "ExecCredential", "expirationTimestamp", "clientCertificateData", "clientKeyData", "interactive"];

/// Runs the program of a kubeconfig's user.
///
/// # Errors
/// It cannot be run, fails, or prints no credentials. The error names the program.
pub(crate) async fn run(config: &ExecConfig) -> Result<ExecCredentials, Reason> {
    let program = config.command.as_deref().ok_or(Reason::NoCommand)?;
    run_program(program, config).await.map_err(|error| Reason::Exec(program.to_owned(), error))
}

async fn run_program(program: &str, config: &ExecConfig) -> Result<ExecCredentials, ExecError> {
    if IS_REFUSED.load(Ordering::Relaxed) {
        return Err(ExecError::Refused);
    }
    let api_version = config.api_version.as_deref().unwrap_or("client.authentication.k8s.io/v1");
    let spec = ExecInfoSpec { interactive: false, cluster: config.cluster.as_ref() };
    let info = serde_json::to_string(&ExecInfo { api_version, kind: "ExecCredential", spec });
    let mut command = Command::new(program);
    command.args(config.args.iter().flatten()).env("KUBERNETES_EXEC_INFO", info.map_err(ExecError::Information)?);
    // Arguments are no secrets: every user of the machine can see them.
    let mut given: Vec<&str> = Vec::new();
    for variable in config.env.iter().flatten() {
        if let (Some(name), Some(value)) = (variable.get("name"), variable.get("value")) {
            given.push(value);
            command.env(name, value);
        }
    }
    let output = run_to_end(command).await.map_err(ExecError::Run)?;
    if !output.status.success() {
        // It may have printed a token and then failed, and repeat what it was given.
        let stdout = String::from_utf8_lossy(&output.stdout);
        given.extend(printed_secrets(&stdout));
        let message = one_line(&cproxy_secrets::hidden_with(&String::from_utf8_lossy(&output.stderr), &given));
        return Err(ExecError::Status(output.status, message.chars().take(MESSAGE_CHARS_MAX).collect()));
    }
    ExecCredentials::read(&output.stdout)
}

/// Words that a program has printed and that may be secrets, whether its output is a credential or not: each one that
/// is long, but for the names that all credentials have.
fn printed_secrets(stdout: &str) -> impl Iterator<Item = &str> {
    let is_part = |char: char| char.is_ascii_alphanumeric() || "-._~+/=".contains(char);
    let words = stdout.split(move |char| !is_part(char)).filter(|word| word.len() >= PRINTED_BYTES_MIN);
    words.filter(|word| !word.starts_with("client.authentication.k8s.io/") && !PRINTED_NAMES.contains(word))
}

/// Processes of a program, which end when this value is dropped.
struct ProcessGroup(Option<Pid>);

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        // They may all have ended.
        self.0.and_then(|leader| kill_process_group(leader, Signal::KILL).ok());
    }
}

/// Runs a program to its end. If it takes too long or prints too much, it ends with all processes that it has started.
async fn run_to_end(mut command: Command) -> io::Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn()?;
    let mut group = ProcessGroup(child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?)));
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let pipes = (child.stdout.take(), child.stderr.take());
    let end = async {
        let mut read = pin!(async { try_join!(read(pipes.0, &mut stdout), read(pipes.1, &mut stderr)) });
        tokio::select! {
            biased;
            read = &mut read => read.map(drop)?,
            status = child.wait() => {
                // A process that the program leaves behind may keep the pipes open.
                timeout(REST_TIME_MAX, read).await.unwrap_or(Ok(((), ())))?;
                return status;
            }
        }
        child.wait().await
    };
    let status = timeout(TIMEOUT, end).await;
    let status =
        status.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {TIMEOUT:?}")))??;
    group.0 = None;
    Ok(Output { status, stdout, stderr })
}

/// Reads a pipe to its end.
async fn read(pipe: Option<impl AsyncRead + Unpin>, output: &mut Vec<u8>) -> io::Result<()> {
    let Some(pipe) = pipe else { return Ok(()) };
    pipe.take(OUTPUT_BYTES_MAX + 1).read_to_end(output).await?;
    if output.len() as u64 > OUTPUT_BYTES_MAX {
        return Err(io::Error::other(format!("it prints more than {OUTPUT_BYTES_MAX} bytes")));
    }
    Ok(())
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
        assert_eq!(error.to_string(), "exec plugin sh: no answer within 25s");
    }

    #[tokio::test]
    async fn a_program_that_prints_without_end_is_ended_with_its_children() {
        let file = std::env::temp_dir().join(format!("cproxy-exec-{}", std::process::id()));
        for redirection in ["", ">&2"] {
            let script = format!("sleep 1000 & echo $! >{}; yes {redirection}; exit 1", file.display());
            let error = run(&shell(&script)).await.unwrap_err();
            assert_eq!(error.to_string(), "exec plugin sh: it prints more than 1048576 bytes");
            let child: i32 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
            let is_alive = || {
                let state = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
                !state.is_empty() && !state.contains(") Z ")
            };
            while is_alive() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        std::fs::remove_file(file).unwrap();
    }

    #[tokio::test]
    async fn a_process_that_is_left_behind_delays_nothing() {
        let start = std::time::Instant::now();
        let script = r#"sleep 20 & echo '{"status":{"token":"a"}}'"#;
        assert_eq!(run(&shell(script)).await.unwrap().token.as_deref(), Some("a"));
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
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
            ("printf 'no\\nlogin\\033' >&2; exit 3", "exit status: 3: no login\u{fffd}"),
            ("kill -9 $$", "signal: 9 (SIGKILL)"),
            ("echo '<html>'", "no ExecCredential"),
            (r#"echo '{"status":"a secret in the wrong place"}'"#, "no ExecCredential (line 1, column 39)"),
            ("echo '{}'", "no status"),
            ("echo '{\"status\":{}}'", "neither a token"),
            (r#"printf '%s' '{"status":{"token":"a\nb"}}'"#, "line feed"),
            ("echo '{\"status\":{\"clientKeyData\":\"k\"}}'", "needs both"),
            ("echo '{\"status\":{\"token\":\"a\",\"expirationTimestamp\":\"soon\"}}'", "expirationTimestamp"),
        ] {
            let error = run(&shell(script)).await.unwrap_err().to_string();
            assert!(error.starts_with("exec plugin sh: ") && error.contains(words), "{error}");
        }
        let missing = ExecConfig { command: Some("/no/such/program".to_owned()), ..ExecConfig::default() };
        assert!(run(&missing).await.unwrap_err().to_string().starts_with("exec plugin /no/such/program: "));
    }
}
