//! Settings that come with the machine, so that a read-only image serves everyone: parameters of the kernel's command line
//! (`cproxy.apiserver=https://10.0.0.1:6443`) and a file (`apiserver = https://10.0.0.1:6443`).
//!
//! Each is a default of the variable of the same name, which is a default of the flag: first counts the flag, then the
//! environment, the kernel's command line, the file.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs, io,
    path::{Path, PathBuf},
};

const KERNEL_COMMAND_LINE: &str = "/proc/cmdline";
const KERNEL_PREFIX: &str = "cproxy.";
const FILE: &str = "/etc/cproxy/cproxy.conf";
/// Where the file is, if it is not there.
const FILE_VARIABLE: &str = "CPROXY_CONFIG";
const VARIABLE_PREFIX: &str = "CPROXY_";

/// Ways to name the source: what names one is no default beside a flag or a variable that names another.
const API_SERVER: [&str; 3] = ["CPROXY_KUBECONFIG", "CPROXY_APISERVER", "CPROXY_TLS_SERVER_NAME"];
const MANIFESTS: &str = "CPROXY_MANIFESTS";

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum SettingsError {
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
    #[error("{0}: {1:?} is no setting; they are named as the flags: {2}")]
    Unknown(String, String, String),
    #[error("{0}: {1:?} has no value; it looks like apiserver = https://10.0.0.1:6443")]
    NoValue(String, String),
}

/// A setting, and where it is from.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Setting {
    place: String,
    /// As the flag without its dashes.
    name: String,
    value: String,
}

impl Setting {
    fn variable(&self) -> String {
        format!("{VARIABLE_PREFIX}{}", self.name.replace('-', "_").to_uppercase())
    }
}

/// Makes variables of the settings that nothing else gives. `known` are the variables that there are.
///
/// To be called while there is one thread.
///
/// # Errors
/// A setting that has no value or is not known (the others are in force all the same), or a file that cannot be read.
#[expect(clippy::disallowed_methods, reason = "nothing else runs yet")]
pub(super) fn apply(known: impl FnOnce() -> BTreeSet<String>) -> Result<(), SettingsError> {
    let (path, text) = read(env::var_os(FILE_VARIABLE).map(PathBuf::from))?;
    let mut found = of_kernel(&fs::read_to_string(KERNEL_COMMAND_LINE).unwrap_or_default());
    found.extend(of_file(&path, &text)?);
    if found.is_empty() {
        return Ok(());
    }
    let known = known();
    let (settings, unknown): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|setting| known.contains(&setting.variable()));
    let given = |variable: &str| env::var_os(variable).is_some() || is_flag_given(variable, env::args());
    for (variable, value) in defaults(&settings, given) {
        // SAFETY: nothing has started a thread yet.
        unsafe { env::set_var(variable, value) };
    }
    unknown.into_iter().next().map_or(Ok(()), |setting| {
        let names: Vec<_> = known.iter().map(|variable| flag_of(variable)).collect();
        Err(SettingsError::Unknown(setting.place, setting.name, names.join(", ")))
    })
}

/// A file that nobody named need not be there.
fn read(named: Option<PathBuf>) -> Result<(PathBuf, String), SettingsError> {
    let is_named = named.is_some();
    let path = named.unwrap_or_else(|| FILE.into());
    match fs::read_to_string(&path) {
        Ok(text) => Ok((path, text)),
        Err(error) if !is_named && error.kind() == io::ErrorKind::NotFound => Ok((path, String::new())),
        Err(error) => Err(SettingsError::Io(path, error)),
    }
}

/// What becomes a variable: the first of each name, unless a flag or variable that is `given` says otherwise.
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

/// The parameters for cproxy. A value with spaces in it is in double quotes, as the kernel has it.
fn of_kernel(command_line: &str) -> Vec<Setting> {
    let mut is_quoted = false;
    let parameters = command_line.split(|char: char| {
        is_quoted ^= char == '"';
        char.is_whitespace() && !is_quoted
    });
    let parameters = parameters.map(|parameter| parameter.replace('"', ""));
    let setting = |parameter: String| {
        let (name, value) = parameter.strip_prefix(KERNEL_PREFIX)?.split_once('=')?;
        let place = format!("kernel parameter {KERNEL_PREFIX}{name}");
        // To the kernel, too, dashes and underscores are the same.
        (!value.is_empty()).then(|| Setting { place, name: name.replace('_', "-"), value: value.to_owned() })
    };
    parameters.filter_map(setting).collect()
}

fn of_file(path: &Path, text: &str) -> Result<Vec<Setting>, SettingsError> {
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    let settings = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).map(|(number, line)| {
        let place = format!("{}, line {number}", path.display());
        match line.split_once('=').map(|(name, value)| (name.trim(), value.trim())) {
            Some((name, value)) if !value.is_empty() => {
                Ok(Setting { place, name: name.to_owned(), value: value.to_owned() })
            }
            _ => Err(SettingsError::NoValue(place, line.to_owned())),
        }
    });
    settings.collect()
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
                    xcproxy.a=1 cproxy.pod-ip= cproxy.exclude-port=53,54\n";
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
        let settings = file("# comment\n\napiserver = https://h?a=b\n  node-name=n\n").unwrap();
        assert_eq!(pairs(&settings), [("apiserver", "https://h?a=b"), ("node-name", "n")]);
        for text in ["apiserver", "node-name =", "a = 1\n[section]"] {
            assert!(file(text).unwrap_err().to_string().starts_with("f, line "), "{text}");
        }
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
    fn flags_are_found_in_either_form() {
        let given = |arguments: &[&str]| {
            is_flag_given("CPROXY_TLS_SERVER_NAME", arguments.iter().map(|argument| (*argument).to_owned()))
        };
        assert!(given(&["cproxy", "run", "--tls-server-name", "n"]) && given(&["--tls-server-name=n"]));
        assert!(!given(&["--tls-server", "--tls-server-names=n"]));
    }
}
