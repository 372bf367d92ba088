//! Configuration from a kubeconfig's current context, by kubectl's rules, but without the environment's proxy.
//!
//! Only what the context names is read: other entries may be broken.

use std::{fs, path::Path};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use kube::{
    Config,
    config::{AuthInfo, Cluster, Context, KubeConfigOptions, Kubeconfig, NamedAuthInfo, NamedCluster, NamedContext},
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::credentials::{
    file::{self, FILE_BYTES_MAX},
    setup_error::Reason,
};
use crate::located::read_located;

/// Stands for no proxy: where a cluster has none, kube takes the one of the environment, which is the pod's.
const NO_PROXY: &str = "none";

/// Configuration, and the place of its certificate authorities, in words.
pub(crate) struct ParsedKubeconfig {
    pub(crate) config: Config,
    /// `None`: those of the system.
    pub(crate) authorities_from: Option<String>,
}

/// Reads the current context of a file. Paths in the file are relative to its directory.
///
/// # Errors
/// The file cannot be read, or lacks what its current context names.
pub(crate) async fn read(path: &Path) -> Result<ParsedKubeconfig, Reason> {
    file::check(path, FILE_BYTES_MAX).map_err(Reason::File)?;
    let text = decode(fs::read(path).map_err(Reason::File)?)?;
    let mut documents = cproxy_yaml::values(&text).map_err(Reason::Yaml)?;
    documents.iter_mut().for_each(set_types);
    documents.iter_mut().for_each(normalize);
    let entries = Entries(documents);
    let (mut cluster, mut user) = entries.current()?;
    let dir = path.parent().unwrap_or(Path::new(""));
    absolute(dir, &mut cluster.certificate_authority);
    for file in [&mut user.client_certificate, &mut user.client_key, &mut user.token_file] {
        absolute(dir, file);
    }
    if let Some(exec) = &mut user.exec
        && exec.command.as_ref().is_some_and(|command| command.contains('/'))
    {
        absolute(dir, &mut exec.command);
    }
    if let Some(authority) = cluster.certificate_authority.as_ref().filter(|path| Path::new(path).exists()) {
        let checked = file::check(Path::new(authority), FILE_BYTES_MAX);
        checked.map_err(|error| Reason::Authority(authority.clone(), error))?;
    }
    if let Some(data) = &cluster.certificate_authority_data {
        decode_base64(data, "certificate-authority-data of its cluster")?;
    }
    if cluster.insecure_skip_tls_verify == Some(true)
        && (cluster.certificate_authority.is_some() || cluster.certificate_authority_data.is_some())
    {
        return Err(Reason::InsecureWithAuthority);
    }
    let authorities_from = match (&cluster.certificate_authority_data, &cluster.certificate_authority) {
        (Some(_), _) => Some(format!("certificate-authority-data of {}", path.display())),
        (None, Some(file)) => Some(format!("certificate-authority {file}")),
        (None, None) => None,
    };
    Ok(ParsedKubeconfig { config: build(cluster, user).await?, authorities_from })
}

/// Bytes of a field in base64.
pub(crate) fn decode_base64(data: &str, field: &str) -> Result<Vec<u8>, Reason> {
    BASE64_STANDARD.decode(data).map_err(|error| Reason::Base64(field.to_owned(), error))
}

/// Text of a file in UTF-8 or, with a byte order mark, in UTF-16, as some shells write it.
fn decode(bytes: Vec<u8>) -> Result<String, Reason> {
    let from_utf16 = |bytes: &[u8], number: fn([u8; 2]) -> u16| {
        let (pairs, rest) = bytes.as_chunks();
        let text = String::from_utf16(&pairs.iter().map(|pair| number(*pair)).collect::<Vec<_>>());
        text.ok().filter(|_| rest.is_empty()).ok_or(Reason::Utf16)
    };
    match bytes.as_slice() {
        [0xff, 0xfe, rest @ ..] => from_utf16(rest, u16::from_le_bytes),
        [0xfe, 0xff, rest @ ..] => from_utf16(rest, u16::from_be_bytes),
        _ => String::from_utf8(bytes).map_err(|error| Reason::Utf8(error.utf8_error())),
    }
}

/// Fields that are true or false.
const BOOLEANS: [&str; 3] = ["insecure-skip-tls-verify", "disable-compression", "provideClusterInfo"];

/// Gives scalars the types of a kubeconfig's fields, as kubectl does: `name: 5` is a text, and `yes` is true.
fn set_types(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str() {
                    Some("yes" | "Yes" | "YES" | "on" | "On" | "ON") if is_boolean(name) => *value = true.into(),
                    Some("no" | "No" | "NO" | "off" | "Off" | "OFF") if is_boolean(name) => *value = false.into(),
                    _ if value.is_boolean() && is_boolean(name) => {}
                    // Of any form, for exec plugins.
                    _ if name == "extensions" => {}
                    _ => set_types(value),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(set_types),
        Value::Number(number) => *value = number.to_string().into(),
        Value::Bool(is) => *value = is.to_string().into(),
        Value::String(_) | Value::Null => {}
    }
}

fn is_boolean(field: &str) -> bool {
    BOOLEANS.contains(&field)
}

/// Reads the fields of clusters and users as client-go does: an empty text is none, and base64 may be in lines.
fn normalize(document: &mut Value) {
    for (list, field) in [("clusters", "cluster"), ("users", "user")] {
        let entries = document.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten();
        for fields in entries.filter_map(|entry| entry.get_mut(field)?.as_object_mut()) {
            fields.retain(|_, value| value.as_str() != Some(""));
            for (_, value) in fields.iter_mut().filter(|(name, _)| name.ends_with("-data")) {
                if let Value::String(data) = value {
                    data.retain(|char| !matches!(char, '\r' | '\n'));
                }
            }
        }
    }
}

fn absolute(dir: &Path, file: &mut Option<String>) {
    // Joining leaves an absolute path as it is.
    let joined = file.as_ref().and_then(|path| dir.join(path).to_str().map(str::to_owned));
    *file = joined.or(file.take());
}

/// Documents of a kubeconfig. Of several entries with a name the first counts, as between the files of `KUBECONFIG`.
struct Entries(Vec<Value>);

impl Entries {
    /// Cluster and user of the current context. The user may be missing.
    fn current(&self) -> Result<(Cluster, AuthInfo), Reason> {
        let mut names = self.0.iter().filter_map(|document| text(document, "current-context"));
        let name = names.next().ok_or(Reason::NoCurrentContext)?;
        let context = self.named("contexts", "context", name);
        let (_, context) = context.ok_or_else(|| Reason::NoContext(name.to_owned()))?;
        let cluster = text(context, "cluster").ok_or_else(|| Reason::NoClusterName(name.to_owned()))?;
        let named = self.named("clusters", "cluster", cluster);
        let (path, cluster) = named.ok_or_else(|| Reason::NoCluster(cluster.to_owned()))?;
        let cluster = deserialize(&path, cluster)?;
        let user = text(context, "user").and_then(|user| self.named("users", "user", user));
        // The text of an error may show a value, and those of a user are secret.
        let user =
            user.map(|(path, user)| deserialize(&path, user).map_err(|_| Reason::UserField(path))).transpose()?;
        Ok((cluster, user.unwrap_or_default()))
    }

    /// The field of the list's entry with that name, and its path.
    fn named(&self, list: &str, field: &str, name: &str) -> Option<(String, &Value)> {
        self.0.iter().filter_map(|document| document.get(list)?.as_array()).find_map(|entries| {
            let index = entries.iter().position(|entry| text(entry, "name") == Some(name))?;
            let value = entries.get(index)?.get(field).filter(|value| !value.is_null())?;
            Some((format!("{list}[{index}].{field}"), value))
        })
    }
}

/// Text of a field that is not empty.
fn text<'v>(value: &'v Value, field: &str) -> Option<&'v str> {
    value.get(field)?.as_str().filter(|text| !text.is_empty())
}

fn deserialize<T: DeserializeOwned>(path: &str, value: &Value) -> Result<T, Reason> {
    read_located(&value.to_string()).map_err(|error| {
        let path = if error.path.is_empty() { path.to_owned() } else { format!("{path}.{}", error.path) };
        Reason::Field(path, error.message)
    })
}

/// Configuration for one cluster and one user.
///
/// # Errors
/// One of them has a value, or names a file, that cannot be used.
pub(crate) async fn build(mut cluster: Cluster, user: AuthInfo) -> Result<Config, Reason> {
    cluster.proxy_url.take_if(|url| url.is_empty());
    cluster.proxy_url.get_or_insert_with(|| NO_PROXY.to_owned());
    let name = "current".to_owned();
    let context = Context { cluster: name.clone(), user: Some(name.clone()), ..Context::default() };
    let kubeconfig = Kubeconfig {
        clusters: vec![NamedCluster { name: name.clone(), cluster: Some(cluster), ..NamedCluster::default() }],
        auth_infos: vec![NamedAuthInfo { name: name.clone(), auth_info: Some(user), ..NamedAuthInfo::default() }],
        contexts: vec![NamedContext { name: name.clone(), context: Some(context), ..NamedContext::default() }],
        current_context: Some(name),
        ..Kubeconfig::default()
    };
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    let mut config = config.map_err(Reason::Kubeconfig)?;
    config.proxy_url.take_if(|url| *url == NO_PROXY);
    if let Some(cluster) = config.auth_info.exec.as_mut().and_then(|exec| exec.cluster.as_mut()) {
        cluster.proxy_url.take_if(|url| url == NO_PROXY);
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const CONTEXT: &str = "current-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n";
    const CLUSTER: &str = "clusters: [{name: other}, {name: k, cluster: {server: 'https://1.2.3.4'}}]\n";

    /// Reads a file of this text in a directory of this name, which it returns, too.
    async fn read_text(directory: &str, text: &str) -> (Result<Config, String>, std::path::PathBuf) {
        let directory = std::env::temp_dir().join(format!("cproxy-kubeconfig-{directory}-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let file = directory.join("config");
        fs::write(&file, text).unwrap();
        let config = read(&file).await.map(|read| read.config).map_err(|error| error.to_string());
        fs::remove_dir_all(&directory).unwrap();
        (config, directory)
    }

    #[tokio::test]
    async fn the_current_context_leads_to_cluster_and_user() {
        let users = "users: [{name: other}, {name: u, user: {token: t}}]\n";
        for text in [
            format!("{CONTEXT}{CLUSTER}{users}"),
            format!("\u{feff}{CONTEXT}---\n{CLUSTER}---\n{users}clusters: [{{name: k, cluster: {{server: later}}}}]\n"),
        ] {
            let config = read_text("context", &text).await.0.unwrap();
            assert_eq!(config.cluster_url, "https://1.2.3.4");
            assert!(config.auth_info.token.is_some() && config.proxy_url.is_none());
        }
    }

    #[tokio::test]
    async fn numbers_are_texts_and_words_are_truths_as_for_kubectl() {
        let text = "current-context: 1\ncontexts: [{name: 1, context: {cluster: 2, user: 3}}]\n\
                    clusters: [{name: 2, cluster: {server: 'https://1.2.3.4', insecure-skip-tls-verify: yes}}]\n\
                    users: [{name: 3, user: {username: 7, password: 12345, as: true}}]\n";
        let config = read_text("types", text).await.0.unwrap();
        assert!(config.accept_invalid_certs);
        let user = config.auth_info;
        assert_eq!((user.username.as_deref(), user.impersonate.as_deref()), (Some("7"), Some("true")));
    }

    #[test]
    fn a_file_may_be_in_utf16() {
        for (mark, bytes) in [
            (0xfeff_u16.to_le_bytes(), u16::to_le_bytes as fn(u16) -> [u8; 2]),
            (0xfeff_u16.to_be_bytes(), u16::to_be_bytes),
        ] {
            let text: Vec<u8> = "current-context: ä".encode_utf16().flat_map(bytes).collect();
            assert_eq!(decode([&mark, &*text].concat()).unwrap(), "current-context: ä");
            assert_eq!(decode([&mark, &text[1..]].concat()).unwrap_err().to_string(), "it is not UTF-16");
        }
    }

    #[tokio::test]
    async fn a_user_may_be_missing_or_empty() {
        for users in ["", "users: []\n", "users: [{name: u}]\n", "users: [{name: u, user: {}}]\n", "users: null\n"] {
            let config = read_text("user", &format!("{CONTEXT}{CLUSTER}{users}")).await.0.unwrap();
            assert!(config.auth_info.token.is_none(), "{users}");
        }
    }

    #[tokio::test]
    async fn empty_texts_are_none_and_base64_may_be_in_lines_as_for_client_go() {
        let user = "users: [{name: u, user: {token: t, tokenFile: '', username: '', client-certificate: '', \
                    client-certificate-data: \"YW\\nJj\\r\\n\", exec: {command: login, args: ['']}}}]\n";
        let cluster = CLUSTER.replace(
            "cluster: {",
            "cluster: {certificate-authority: '', certificate-authority-data: '', tls-server-name: '', ",
        );
        let config = read_text("empty", &format!("{CONTEXT}{cluster}{user}")).await.0.unwrap();
        assert!(config.root_cert.is_none() && config.tls_server_name.is_none());
        let user = config.auth_info;
        assert!(user.token.is_some() && user.token_file.is_none() && user.username.is_none());
        assert!(user.client_certificate.is_none());
        assert_eq!(user.client_certificate_data.as_deref(), Some("YWJj"));
        assert_eq!(user.exec.unwrap().args.unwrap(), [""]);
    }

    #[tokio::test]
    async fn errors_name_the_missing_entry_or_the_place() {
        let context = "current-context: c\n";
        for (text, words) in [
            ("clusters: [{".to_owned(), &["YAML", "line 1"][..]),
            (String::new(), &["current-context"]),
            (context.to_owned(), &["no context c"]),
            (format!("{context}contexts: [{{name: c, context: {{}}}}]\n"), &["context c", "names no cluster"]),
            (CONTEXT.to_owned(), &["no cluster k", "context"]),
            (format!("{CONTEXT}clusters: [{{name: k, cluster: x}}]\n"), &["clusters[0].cluster: ", "x"]),
            (format!("{CONTEXT}clusters: [{{name: k, cluster: {{}}}}]\n"), &["cluster url is missing"]),
            (format!("{CONTEXT}{CLUSTER}users: [{{name: u, user: {{token: [t]}}}}]\n"), &["users[0].user: ", "type"]),
            ("\u{feff}current-context: \"\"\n".to_owned(), &["no current-context"]),
            (
                format!(
                    "{CONTEXT}{}",
                    CLUSTER.replace(
                        "cluster: {",
                        "cluster: {insecure-skip-tls-verify: true, certificate-authority: /ca.crt, "
                    )
                ),
                &["insecure-skip-tls-verify", "certificate-authority"],
            ),
        ] {
            let error = read_text("errors", &text).await.0.unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)) && !error.contains('\n'), "{text}: {error}");
        }
    }

    #[tokio::test]
    async fn paths_are_relative_to_the_file() {
        let users = "users: [{name: u, user: {tokenFile: token, client-key: /key, exec: {command: bin/login}}}]\n";
        let (config, directory) = read_text("paths", &format!("{CONTEXT}{CLUSTER}{users}")).await;
        let user = config.unwrap().auth_info;
        let path = |name: &str| Some(directory.join(name).display().to_string());
        assert_eq!((user.token_file, user.client_key), (path("token"), Some("/key".to_owned())));
        assert_eq!(user.exec.unwrap().command, path("bin/login"));
        let cluster = CLUSTER.replace("cluster: {", "cluster: {certificate-authority: ca, ");
        let (config, directory) = read_text("authority", &format!("{CONTEXT}{cluster}")).await;
        let error = config.unwrap_err();
        assert!(error.contains(&directory.join("ca").display().to_string()), "{error}");
    }

    #[tokio::test]
    async fn only_the_files_own_proxy_counts() {
        let read = async |proxy: &str| {
            let cluster = CLUSTER.replace("cluster: {", &format!("cluster: {{{proxy}"));
            let users = "users: [{name: u, user: {exec: {command: login, provideClusterInfo: true}}}]\n";
            let config = read_text("proxy", &format!("{CONTEXT}{cluster}{users}")).await.0.unwrap();
            let of_exec = config.auth_info.exec.unwrap().cluster.unwrap().proxy_url;
            (config.proxy_url.map(|url| url.to_string()), of_exec)
        };
        let url = "http://1.2.3.4:8080/".to_owned();
        assert_eq!(read("proxy-url: 'http://1.2.3.4:8080/', ").await, (Some(url.clone()), Some(url)));
        assert_eq!(read("proxy-url: '', ").await, (None, None));
        assert_eq!(read("").await, (None, None));
    }
}
