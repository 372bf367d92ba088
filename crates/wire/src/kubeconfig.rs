//! Configuration from a kubeconfig's current context, as kube reads it, but without the environment's proxy.

use std::path::Path;

use super::{
    error_text::chain,
    file::{self, FILE_BYTES_MAX},
};
use kube::{
    Config,
    config::{
        AuthInfo, Cluster, Context, KubeConfigOptions, Kubeconfig, KubeconfigError, NamedAuthInfo, NamedCluster,
        NamedContext,
    },
};

/// Stands for no proxy: where a cluster has none, kube takes the one of the environment, which is the pod's.
const NO_PROXY: &str = "none";

/// Reads the current context of a file. Paths in the file are relative to its directory.
pub(super) async fn read(path: &Path) -> Result<Config, String> {
    file::check(path, FILE_BYTES_MAX).map_err(|error| error.to_string())?;
    let kubeconfig = Kubeconfig::read_from(path).map_err(|error| describe(&error))?;
    let authorities =
        kubeconfig.clusters.iter().filter_map(|named| named.cluster.as_ref()?.certificate_authority.as_ref());
    for authority in authorities.filter(|path| Path::new(path).exists()) {
        let checked = file::check(Path::new(authority), FILE_BYTES_MAX);
        checked.map_err(|error| format!("certificate-authority {authority} of a cluster: {error}"))?;
    }
    configure(kubeconfig).await
}

/// Configuration for one cluster and one user.
pub(super) async fn build(cluster: Cluster, user: AuthInfo) -> Result<Config, String> {
    let name = "current".to_owned();
    let context = Context { cluster: name.clone(), user: Some(name.clone()), ..Context::default() };
    let kubeconfig = Kubeconfig {
        clusters: vec![NamedCluster { name: name.clone(), cluster: Some(cluster), ..NamedCluster::default() }],
        auth_infos: vec![NamedAuthInfo { name: name.clone(), auth_info: Some(user), ..NamedAuthInfo::default() }],
        contexts: vec![NamedContext { name: name.clone(), context: Some(context), ..NamedContext::default() }],
        current_context: Some(name),
        ..Kubeconfig::default()
    };
    configure(kubeconfig).await
}

async fn configure(mut kubeconfig: Kubeconfig) -> Result<Config, String> {
    for cluster in kubeconfig.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
        cluster.proxy_url.take_if(|url| url.is_empty());
        cluster.proxy_url.get_or_insert_with(|| NO_PROXY.to_owned());
    }
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    let mut config = config.map_err(|error| describe(&error))?;
    config.proxy_url.take_if(|url| *url == NO_PROXY);
    if let Some(cluster) = config.auth_info.exec.as_mut().and_then(|exec| exec.cluster.as_mut()) {
        cluster.proxy_url.take_if(|url| url == NO_PROXY);
    }
    Ok(config)
}

/// An error in one line, without the name of the file.
fn describe(error: &KubeconfigError) -> String {
    match error {
        KubeconfigError::ReadConfig(error, _) => error.to_string(),
        KubeconfigError::CurrentContextNotSet => "it has no current-context".to_owned(),
        KubeconfigError::LoadContext(context) => format!("it has no context {context}, which is its current-context"),
        KubeconfigError::LoadClusterOfContext(cluster) => {
            format!("it has no cluster {cluster}, which its current context names")
        }
        error => chain(error),
    }
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
        let config = read(&file).await;
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
    async fn a_user_may_be_missing_or_empty() {
        for users in ["", "users: []\n", "users: [{name: u}]\n", "users: [{name: u, user: {}}]\n", "users: null\n"] {
            let config = read_text("user", &format!("{CONTEXT}{CLUSTER}{users}")).await.0.unwrap();
            assert!(config.auth_info.token.is_none(), "{users}");
        }
    }

    #[tokio::test]
    async fn errors_name_the_missing_entry_or_the_line() {
        let context = "current-context: c\n";
        for (text, words) in [
            ("clusters: [{".to_owned(), &["YAML", "line 1"][..]),
            (String::new(), &["current-context"]),
            (context.to_owned(), &["no context c"]),
            (format!("{context}contexts: [{{name: c, context: {{}}}}]\n"), &["cluster", "line 2"]),
            (CONTEXT.to_owned(), &["no cluster k", "context"]),
            (format!("{CONTEXT}clusters: [{{name: k, cluster: x}}]\n"), &["line 3"]),
            (format!("{CONTEXT}clusters: [{{name: k, cluster: {{}}}}]\n"), &["cluster url is missing"]),
            (format!("{CONTEXT}{CLUSTER}users: [{{name: u, user: {{token: [t]}}}}]\n"), &["line 4"]),
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
