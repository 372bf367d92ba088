//! Cluster and user of a kubeconfig's current context. The file is read as plain data first, as manifests are: kube's
//! reader compiles the YAML parser once for each of a dozen types, most of which are not needed here.

use std::{fs, path::Path};

use kube::config::{AuthInfo, Cluster, Context, Kubeconfig, NamedAuthInfo, NamedCluster, NamedContext};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::error_text::first_line;

/// Reads the current context's cluster and user from a file. Paths in the file are relative to its directory.
pub(super) fn read(path: &Path) -> Result<(Cluster, AuthInfo), String> {
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    let (mut cluster, mut user) = parse(&text)?;
    if cluster.proxy_url.as_ref().is_some_and(|url| !url.is_empty()) {
        return Err(
            "its cluster has a proxy-url, which is not supported: cproxy reaches the API server directly".to_owned()
        );
    }
    let directory = path.parent().unwrap_or(Path::new(""));
    let command = user.exec.as_mut().and_then(|exec| exec.command.as_mut());
    let files = [
        cluster.certificate_authority.as_mut(),
        user.client_certificate.as_mut(),
        user.client_key.as_mut(),
        user.token_file.as_mut(),
        // A command without a slash is searched for in PATH.
        command.filter(|command| command.contains('/')),
    ];
    for file in files.into_iter().flatten().filter(|file| !file.is_empty()) {
        *file =
            directory.join(&*file).into_os_string().into_string().map_err(|_| "its path is not UTF-8".to_owned())?;
    }
    Ok((cluster, user))
}

/// Kubeconfig with one cluster and one user.
pub(super) fn minimal(cluster: Cluster, user: AuthInfo) -> Kubeconfig {
    let name = "current".to_owned();
    let context = Context { cluster: name.clone(), user: Some(name.clone()), ..Context::default() };
    Kubeconfig {
        clusters: vec![NamedCluster { name: name.clone(), cluster: Some(cluster), ..NamedCluster::default() }],
        auth_infos: vec![NamedAuthInfo { name: name.clone(), auth_info: Some(user), ..NamedAuthInfo::default() }],
        contexts: vec![NamedContext { name: name.clone(), context: Some(context), ..NamedContext::default() }],
        current_context: Some(name),
        ..Kubeconfig::default()
    }
}

/// Parses the documents of a file. The first one that sets a field wins, as with several files.
fn parse(text: &str) -> Result<(Cluster, AuthInfo), String> {
    // In YAML 1.1 the names n and yes would be booleans.
    let options = serde_saphyr::options! { strict_booleans: true };
    let documents: Vec<Value> = serde_saphyr::from_multiple_with_options(text.trim_start_matches('\u{feff}'), options)
        .map_err(|error| format!("not YAML: {}", first_line(&error)))?;
    let current = documents.iter().find_map(|document| name(document, "current-context"));
    let current = current.ok_or("it names no current-context")?;
    let context =
        entry(&documents, "contexts", "context", current).ok_or_else(|| format!("it has no context {current}"))?;
    let cluster = name(context, "cluster").ok_or_else(|| format!("its context {current} names no cluster"))?;
    let found = entry(&documents, "clusters", "cluster", cluster);
    let found = found.ok_or_else(|| format!("it has no cluster {cluster}, which its context {current} names"))?;
    let found = typed(found, || format!("cluster {cluster}"))?;
    // As in kubectl, a missing user is one without credentials.
    let user = name(context, "user").and_then(|user| Some((user, entry(&documents, "users", "user", user)?)));
    let user = user.map(|(user, found)| typed(found, || format!("user {user}"))).transpose()?;
    Ok((found, user.unwrap_or_default()))
}

/// Text of a field, unless it is empty.
fn name<'a>(value: &'a Value, field: &str) -> Option<&'a str> {
    value.get(field).and_then(Value::as_str).filter(|text| !text.is_empty())
}

/// Entry of this name in a list of named entries.
fn entry<'a>(documents: &'a [Value], list: &str, field: &str, name: &str) -> Option<&'a Value> {
    let mut entries = documents.iter().filter_map(|document| document.get(list)?.as_array()).flatten();
    let entry = entries.find(|entry| entry.get("name").and_then(Value::as_str) == Some(name))?;
    entry.get(field).filter(|value| !value.is_null())
}

fn typed<T: DeserializeOwned>(value: &Value, owner: impl Fn() -> String) -> Result<T, String> {
    serde_json::from_value(value.clone()).map_err(|error| format!("{}: {error}", owner()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: &str = "current-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n";
    const CLUSTER: &str = "clusters: [{name: other}, {name: k, cluster: {server: 'https://1.2.3.4'}}]\n";

    #[test]
    fn the_current_context_leads_to_cluster_and_user() {
        let users = "users: [{name: other, user: {token: [a]}}, {name: u, user: {token: t}}]\n";
        for text in [
            format!("{CONTEXT}{CLUSTER}{users}"),
            format!("\u{feff}{CONTEXT}---\n{CLUSTER}---\n{users}clusters: [{{name: k, cluster: {{server: later}}}}]\n"),
        ] {
            let (cluster, user) = parse(&text).unwrap();
            assert_eq!(cluster.server.as_deref(), Some("https://1.2.3.4"));
            assert!(user.token.is_some());
        }
    }

    #[test]
    fn a_user_may_be_missing_or_empty() {
        for users in ["", "users: []\n", "users: [{name: u}]\n", "users: [{name: u, user: {}}]\n", "users: null\n"] {
            assert!(parse(&format!("{CONTEXT}{CLUSTER}{users}")).unwrap().1.token.is_none(), "{users}");
        }
    }

    #[test]
    fn errors_name_the_entry_that_is_wrong() {
        let context = "current-context: c\n";
        for (text, words) in [
            ("clusters: [{".to_owned(), &["not YAML"][..]),
            (String::new(), &["current-context"]),
            (context.to_owned(), &["no context c"]),
            (format!("{context}contexts: [{{name: c, context: {{}}}}]\n"), &["context c", "no cluster"]),
            (CONTEXT.to_owned(), &["no cluster k", "context c"]),
            (format!("{CONTEXT}clusters: [{{name: k, cluster: x}}]\n"), &["cluster k", "invalid type"]),
            (format!("{CONTEXT}{CLUSTER}users: [{{name: u, user: {{token: [t]}}}}]\n"), &["user u", "invalid type"]),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)) && !error.contains('\n'), "{text}: {error}");
        }
    }

    #[test]
    fn paths_are_relative_to_the_file() {
        let directory = std::env::temp_dir().join(format!("cproxy-kubeconfig-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let users = "users: [{name: u, user: {tokenFile: token, client-key: /key, exec: {command: bin/login}}}]\n";
        let file = directory.join("config");
        fs::write(&file, format!("{CONTEXT}clusters: [{{name: k, cluster: {{certificate-authority: ca}}}}]\n{users}"))
            .unwrap();
        let (cluster, user) = read(&file).unwrap();
        fs::remove_dir_all(&directory).unwrap();
        let path = |name: &str| Some(directory.join(name).display().to_string());
        assert_eq!(cluster.certificate_authority, path("ca"));
        assert_eq!((user.token_file, user.client_key), (path("token"), Some("/key".to_owned())));
        assert_eq!(user.exec.unwrap().command, path("bin/login"));
    }

    #[test]
    fn a_proxy_is_refused() {
        let file = std::env::temp_dir().join(format!("cproxy-kubeconfig-proxy-{}", std::process::id()));
        let read = |proxy: &str| {
            fs::write(&file, format!("{CONTEXT}clusters: [{{name: k, cluster: {{proxy-url: '{proxy}'}}}}]\n")).unwrap();
            read(&file)
        };
        let (refused, accepted) = (read("http://1.2.3.4").unwrap_err(), read("").is_ok());
        fs::remove_file(&file).unwrap();
        assert!(refused.contains("proxy-url, which is not supported") && accepted, "{refused}");
    }
}
