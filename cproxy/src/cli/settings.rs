//! Settings from the machine, so that one read-only image fits all VMs: parameters of the kernel's command line
//! (`cproxy.apiserver=https://10.0.0.1:6443`) and a file (`apiserver = https://10.0.0.1:6443`).
//!
//! The flag comes first, then the environment, the kernel's command line and the file.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs, io,
    path::{Path, PathBuf},
};

const KERNEL_COMMAND_LINE: &str = "/proc/cmdline";
const KERNEL_PREFIX: &str = "cproxy.";
const FILE: &str = "/etc/cproxy/cproxy.conf";
/// Variable with the path of another file.
const FILE_VARIABLE: &str = "CPROXY_CONFIG";
const VARIABLE_PREFIX: &str = "CPROXY_";

const LINE_CHARS_MAX: usize = 80;

/// Settings that select the source. One of them is ignored where a nearer place selects another source.
const API_SERVER: [&str; 3] = ["CPROXY_KUBECONFIG", "CPROXY_APISERVER", "CPROXY_TLS_SERVER_NAME"];
const MANIFESTS: &str = "CPROXY_MANIFESTS";

/// Reason why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum SettingsError {
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
    #[error("{0}: {1:?} is no setting; they are named as the flags: {2}")]
    Unknown(String, String, String),
    #[error("{0}: {1:?} has no value; it looks like apiserver = https://10.0.0.1:6443")]
    NoValue(String, String),
    #[error("{0}: the value has a zero byte in it")]
    ZeroByte(String),
}

/// Setting and its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Setting {
    place: String,
    /// Name of the flag, without its dashes.
    name: String,
    value: String,
}

impl Setting {
    fn variable(&self) -> String {
        format!("{VARIABLE_PREFIX}{}", self.name.replace('-', "_").to_uppercase())
    }
}

/// Turns settings that no flag or variable gives into environment variables. `known` are the existing variables.
///
/// To be called while there is one thread.
///
/// # Errors
/// A setting without a value or with an unknown name, or a file that cannot be read. The other settings take effect all
/// the same.
#[expect(clippy::disallowed_methods, reason = "nothing else runs yet")]
pub(super) fn apply(known: impl FnOnce() -> BTreeSet<String>) -> Result<(), SettingsError> {
    let (file, wrong) = of_files(env::var_os(FILE_VARIABLE).map(PathBuf::from));
    let kernel = fs::read(KERNEL_COMMAND_LINE).unwrap_or_default();
    let found = nearest_first(of_kernel(&String::from_utf8_lossy(&kernel)), file);
    if found.is_empty() {
        return wrong.map_or(Ok(()), Err);
    }
    let known = known();
    let (settings, unknown): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|setting| known.contains(&setting.variable()));
    let arguments = || env::args_os().map(|argument| argument.to_string_lossy().into_owned());
    let given = |variable: &str| env::var_os(variable).is_some() || is_flag_given(variable, arguments());
    for (variable, value) in defaults(&settings, given) {
        // SAFETY: nothing has started a thread yet.
        unsafe { env::set_var(variable, value) };
    }
    let unknown = unknown.into_iter().next().map(|setting| {
        let names: Vec<_> = known.iter().map(|variable| flag_of(variable)).collect();
        SettingsError::Unknown(setting.place, cut(&setting.name), names.join(", "))
    });
    wrong.or(unknown).map_or(Ok(()), Err)
}

/// Settings of the file, and its first error. Only a file that is named by the variable must exist.
fn of_files(named: Option<PathBuf>) -> (Vec<Setting>, Option<SettingsError>) {
    let is_named = named.is_some();
    let path = named.unwrap_or_else(|| FILE.into());
    match fs::read(&path) {
        Ok(text) => of_file(&path, &String::from_utf8_lossy(&text)),
        Err(error) if !is_named && error.kind() == io::ErrorKind::NotFound => (Vec::new(), None),
        Err(error) => (Vec::new(), Some(SettingsError::Io(path, error))),
    }
}

/// Part of a line that an error shows.
fn cut(line: &str) -> String {
    line.chars().take(LINE_CHARS_MAX).collect()
}

/// Settings, nearest place first. Of duplicates in one place the last one counts, as with the kernel's own parameters.
fn nearest_first(kernel: Vec<Setting>, file: Vec<Setting>) -> Vec<Setting> {
    kernel.into_iter().rev().chain(file.into_iter().rev()).collect()
}

/// Settings that become variables: the first of each name, unless a flag or variable is `given`.
fn defaults(settings: &[Setting], given: impl Fn(&str) -> bool) -> BTreeMap<String, &str> {
    let mut defaults = BTreeMap::new();
    let is_manifests = |variable: &str| variable == MANIFESTS;
    let is_api_server = |variable: &str| API_SERVER.contains(&variable);
    for setting in settings {
        let variable = setting.variable();
        let has = |variable: &str| given(variable) || defaults.contains_key(variable);
        let contradicts =
            is_manifests(&variable) && API_SERVER.into_iter().any(has) || is_api_server(&variable) && has(MANIFESTS);
        if !given(&variable) && !contradicts {
            defaults.entry(variable).or_insert(&*setting.value);
        }
    }
    defaults
}

fn flag_of(variable: &str) -> String {
    variable.trim_start_matches(VARIABLE_PREFIX).replace('_', "-").to_lowercase()
}

fn is_flag_given(variable: &str, mut arguments: impl Iterator<Item = String>) -> bool {
    let flag = format!("--{}", flag_of(variable));
    arguments.any(|argument| argument.split('=').next() == Some(&flag))
}

/// Parameters for cproxy, up to `--`. A value with spaces is in double quotes, as in the kernel.
fn of_kernel(command_line: &str) -> Vec<Setting> {
    let mut is_quoted = false;
    let parameters = command_line.split(|char: char| {
        is_quoted ^= char == '"';
        char.is_whitespace() && !is_quoted
    });
    let parameters = parameters.take_while(|&parameter| parameter != "--").map(|parameter| parameter.replace('"', ""));
    let setting = |parameter: String| {
        let (name, value) = parameter.strip_prefix(KERNEL_PREFIX)?.split_once('=')?;
        let place = format!("kernel parameter {KERNEL_PREFIX}{name}");
        // To the kernel, too, dashes and underscores are the same.
        (!value.is_empty()).then(|| Setting { place, name: name.replace('_', "-"), value: value.to_owned() })
    };
    parameters.filter_map(setting).collect()
}

fn of_file(path: &Path, text: &str) -> (Vec<Setting>, Option<SettingsError>) {
    let text = text.trim_start_matches('\u{feff}');
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    let settings = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).map(|(number, line)| {
        let place = format!("{}, line {number}", path.display());
        match line.split_once('=').map(|(name, value)| (name.trim(), value.trim())) {
            Some((_, value)) if value.contains('\0') => Err(SettingsError::ZeroByte(place)),
            Some((name, value)) if !value.is_empty() => {
                Ok(Setting { place, name: name.to_owned(), value: value.to_owned() })
            }
            _ => Err(SettingsError::NoValue(place, cut(line))),
        }
    });
    let (good, wrong): (Vec<_>, Vec<_>) = settings.partition(Result::is_ok);
    (good.into_iter().flatten().collect(), wrong.into_iter().find_map(Result::err))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(settings: &[Setting]) -> Vec<(&str, &str)> {
        settings.iter().map(|setting| (&*setting.name, &*setting.value)).collect()
    }

    #[test]
    fn kernel_parameters_may_be_quoted() {
        let line = "console=ttyS0 cproxy.apiserver=https://10.0.0.1:6443 \"cproxy.bootstrap=/a b\" cproxy.node_name=\"n 1\" \
                    xcproxy.a=1 cproxy.pod-ip= cproxy.exclude-port=53,54 -- /app cproxy.mode=fast\n";
        assert_eq!(
            pairs(&of_kernel(line)),
            [
                ("apiserver", "https://10.0.0.1:6443"),
                ("bootstrap", "/a b"),
                ("node-name", "n 1"),
                ("exclude-port", "53,54")
            ]
        );
    }

    #[test]
    fn lines_of_a_file_have_names_and_values() {
        let file = |text: &str| of_file(Path::new("f"), text);
        let (settings, wrong) = file("\u{feff}# comment\r\n\r\napiserver = https://h?a=b\r\n  node-name=n\n");
        assert_eq!(pairs(&settings), [("apiserver", "https://h?a=b"), ("node-name", "n")]);
        assert!(wrong.is_none());
        for text in ["apiserver\na = 1", "a = 1\nnode-name =", "a = 1\n[section]", "a = 1\nb = 1\0"] {
            let (settings, wrong) = file(text);
            assert_eq!(pairs(&settings), [("a", "1")], "the rest counts");
            assert!(wrong.unwrap().to_string().starts_with("f, line "), "{text}");
        }
        assert!(file(&"x".repeat(1 << 20)).1.unwrap().to_string().len() < 200);
    }

    #[test]
    fn what_is_nearer_counts_and_no_source_is_named_beside_another() {
        let setting =
            |name: &str, value: &str| Setting { place: String::new(), name: name.into(), value: value.into() };
        let settings = [setting("apiserver", "kernel"), setting("apiserver", "file"), setting("manifests", "file")];
        let variables = |given: &[&str]| {
            let defaults = defaults(&settings, |variable| given.contains(&variable));
            defaults.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
        };
        assert_eq!(variables(&[]), ["CPROXY_APISERVER=kernel"]);
        assert_eq!(variables(&["CPROXY_MANIFESTS"]), [""; 0]);
        assert_eq!(variables(&["CPROXY_APISERVER"]), [""; 0]);
        assert_eq!(variables(&["CPROXY_NODE_NAME"]), ["CPROXY_APISERVER=kernel"]);
    }

    #[test]
    fn of_two_in_one_place_the_last_counts() {
        let kernel = of_kernel("cproxy.timeout=3s cproxy.for=a/b cproxy.timeout=9s");
        let (file, _) = of_file(Path::new("f"), "timeout = 1s\nlog-level = info\nlog-level = warn\n");
        let settings = nearest_first(kernel, file);
        let defaults: Vec<_> = defaults(&settings, |_| false).into_values().collect();
        assert_eq!(defaults, ["a/b", "warn", "9s"]);
    }

    #[test]
    fn flags_are_found_in_either_form() {
        let given = |arguments: &[&str]| {
            is_flag_given("CPROXY_TLS_SERVER_NAME", arguments.iter().map(|argument| (*argument).to_owned()))
        };
        assert!(given(&["cproxy", "run", "--tls-server-name", "n"]) && given(&["--tls-server-name=n"]));
        assert!(!given(&["--tls-server", "--tls-server-names=n"]));
    }
}
