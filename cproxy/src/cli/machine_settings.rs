//! Settings of the machine, so that one read-only image fits all VMs: parameters of the kernel's command line
//! (`cproxy.apiserver=https://10.0.0.1:6443`) and a file (`apiserver = https://10.0.0.1:6443`).
//!
//! The flag comes first, then the environment, the kernel's command line and the file.

use std::{
    collections::BTreeSet,
    env, fs, io,
    path::{Path, PathBuf},
};

use clap::{
    Arg, ArgMatches, Command, Id,
    builder::{ArgPredicate, Resettable},
    parser::ValueSource,
};
use cproxy_core::sorted_map;

use cproxy_wire::file::{self, FILE_BYTES_MAX};

use super::usage_error::{shorten, summary};
use crate::config::Origins;

const KERNEL_COMMAND_LINE: &str = "/proc/cmdline";
const KERNEL_PREFIX: &str = "cproxy.";
const FILE: &str = "/etc/cproxy/cproxy.conf";
/// Start of all variables, and of those of the relay.
const VARIABLE_PREFIX: &str = "CPROXY_";
const RELAY_PREFIX: &str = "CPROXY_RELAY_";
/// Variable with the path of another file.
const FILE_VARIABLE: &str = "CPROXY_CONFIG";

/// Commands whose flags are settings. Other commands use the settings of the flags that they share.
const COMMANDS: [&str; 2] = ["run", "wait"];

/// Longest value, and longest item of a list: no path is longer (`PATH_MAX`).
const VALUE_BYTES_MAX: usize = 4096;

/// Reason why settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum SettingsError {
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
    #[error("{FILE_VARIABLE} names {0}, which cannot be read: {1}")]
    Named(PathBuf, io::Error),
    #[error("{0}: {1:?} is not a setting; settings are named like the flags: {2}")]
    Unknown(String, String, String),
    #[error("{0}: {1:?} has no value; write it like apiserver = https://10.0.0.1:6443")]
    NoValue(String, String),
    #[error("{0}: the value contains a zero byte")]
    ZeroByte(String),
    #[error("{0}: comments need their own line: {1:?}")]
    Comment(String, String),
    #[error("{0}: {1}")]
    InvalidValue(String, String),
    #[error("{0}: {1} has a value that begins with {2:?} and is longer than {3} bytes")]
    TooLong(String, String, String, usize),
    #[error("{0}: {1} cannot be used with {3} ({2}): remove one of the two")]
    Conflict(String, String, String, String),
}

/// Settings of the machine.
#[derive(Debug, Default)]
pub(super) struct MachineSettings {
    /// Those that are valid, nearest place first.
    pub(super) valid: Vec<GivenSetting>,
    /// Error of the first of the others.
    pub(super) error: Option<SettingsError>,
}

/// Setting and the place that has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GivenSetting {
    origin: String,
    /// Name of the flag, without its dashes.
    name: String,
    value: String,
}

impl GivenSetting {
    /// As to the kernel, dashes and underscores are the same.
    fn new(origin: String, name: &str, value: &str) -> Self {
        Self { origin, name: name.replace('_', "-"), value: value.to_owned() }
    }
}

/// Reads the settings and makes them the defaults of the flags with their names.
///
/// The error is that of the first setting without a value, with an unknown name or an invalid value, or of a file that
/// cannot be read. The other settings take effect all the same.
pub(super) fn with_settings(cli: Command) -> (Command, MachineSettings) {
    let (file, broken) = read_file(env::var_os(FILE_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from));
    let kernel = fs::read(KERNEL_COMMAND_LINE).unwrap_or_default();
    let kernel = parse_command_line(&String::from_utf8_lossy(&kernel));
    let conflict = conflict(&cli, &kernel).or_else(|| conflict(&cli, &file));
    let (valid, invalid) = validate(&cli, nearest_first(kernel, file));
    let cli = cli.mut_subcommands(|command| with_defaults(command, &valid));
    (cli, MachineSettings { valid, error: broken.or(invalid).or(conflict) })
}

/// Variables that are named like settings and are none. An empty one is ignored, as by clap. Those that Kubernetes
/// makes for a Service whose name begins with `cproxy` are no mistakes, nor are the relay's.
pub(super) fn unknown_variables(cli: &Command) -> Vec<String> {
    let mut known = BTreeSet::new();
    known.insert(FILE_VARIABLE.to_owned());
    add_variables(cli, &mut known);
    let is_of_service = |name: &str| name.contains("_SERVICE_") || name.contains("_PORT_") || name.ends_with("_PORT");
    let given = env::vars_os().filter(|(_, value)| !value.is_empty());
    let names = given.filter_map(|(name, _)| name.into_string().ok());
    let ours = names.filter(|name| name.starts_with(VARIABLE_PREFIX) && !name.starts_with(RELAY_PREFIX));
    ours.filter(|name| !known.contains(name) && !is_of_service(name)).collect()
}

fn add_variables(command: &Command, known: &mut BTreeSet<String>) {
    let variables = command.get_arguments().filter_map(|flag| flag.get_env()?.to_str());
    known.extend(variables.map(str::to_owned));
    command.get_subcommands().for_each(|below| add_variables(below, known));
}

/// Places of the values of a command's flags, by the flag's name. Defaults are left out.
pub(super) fn origins(command: &Command, matches: &ArgMatches, settings: &[GivenSetting]) -> Origins {
    let origin = |flag: &Arg| {
        let name = flag.get_long()?;
        let origin = match matches.value_source(flag.get_id().as_str())? {
            ValueSource::CommandLine => "flag".to_owned(),
            ValueSource::EnvVariable => "environment".to_owned(),
            _ => settings.iter().find(|setting| setting.name == name)?.origin.clone(),
        };
        Some((name.to_owned(), origin))
    };
    command.get_arguments().filter_map(origin).collect()
}

/// Settings of the file, and its first error. Only a file that is named by the variable must exist.
fn read_file(named: Option<PathBuf>) -> (Vec<GivenSetting>, Option<SettingsError>) {
    let is_named = named.is_some();
    let path = named.unwrap_or_else(|| FILE.into());
    match file::read(&path, FILE_BYTES_MAX) {
        Ok(text) => parse_file(&path, &String::from_utf8_lossy(&text)),
        Err(error) if is_named => (Vec::new(), Some(SettingsError::Named(path, error))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => (Vec::new(), None),
        Err(error) => (Vec::new(), Some(SettingsError::Io(path, error))),
    }
}

/// Settings, nearest place first. Of duplicates in one place the last one counts, as with the kernel's own parameters.
fn nearest_first(kernel: Vec<GivenSetting>, file: Vec<GivenSetting>) -> Vec<GivenSetting> {
    kernel.into_iter().rev().chain(file.into_iter().rev()).collect()
}

/// Settings that name a flag and have a value for it, and the first error of the others.
fn validate(cli: &Command, settings: Vec<GivenSetting>) -> (Vec<GivenSetting>, Option<SettingsError>) {
    let flags = COMMANDS.iter().filter_map(|name| cli.find_subcommand(name)).flat_map(Command::get_arguments);
    let flags = sorted_map(flags.filter_map(|flag| Some((flag.get_long()?, flag))));
    let check = |setting: GivenSetting| {
        let Some(&flag) = flags.get(&*setting.name) else {
            let names = flags.keys().copied().collect::<Vec<_>>().join(", ");
            return Err(SettingsError::Unknown(setting.origin, shorten(&setting.name), names));
        };
        if let Some(long) = setting.value.split(',').find(|value| value.len() > VALUE_BYTES_MAX) {
            return Err(SettingsError::TooLong(setting.origin, setting.name, shorten(long), VALUE_BYTES_MAX));
        }
        let parser = Command::new("").no_binary_name(true).arg(flag.clone().conflicts_with(Resettable::Reset));
        match parser.try_get_matches_from([format!("--{}={}", setting.name, setting.value)]) {
            Ok(_) => Ok(setting),
            Err(error) => {
                let is_list = flag.get_value_delimiter().is_some() && setting.value.contains(char::is_whitespace);
                let remedy = if is_list { "; separate several with commas" } else { "" };
                Err(SettingsError::InvalidValue(setting.origin, summary(&error) + remedy))
            }
        }
    };
    partition(settings.into_iter().map(check))
}

/// Two settings of one place that exclude each other, as they do on the command line.
fn conflict(cli: &Command, settings: &[GivenSetting]) -> Option<SettingsError> {
    let run = cli.find_subcommand("run")?;
    let id = |setting: &GivenSetting| {
        Some(run.get_arguments().find(|flag| flag.get_long() == Some(&setting.name))?.get_id())
    };
    settings.iter().enumerate().find_map(|(index, later)| {
        let conflicts = conflicts_of(run, id(later)?);
        let mut earlier = settings.iter().take(index);
        let GivenSetting { origin, name, .. } =
            earlier.find(|earlier| id(earlier).is_some_and(|id| conflicts.contains(id)))?;
        Some(SettingsError::Conflict(later.origin.clone(), later.name.clone(), origin.clone(), name.clone()))
    })
}

fn partition(
    settings: impl Iterator<Item = Result<GivenSetting, SettingsError>>,
) -> (Vec<GivenSetting>, Option<SettingsError>) {
    let (good, wrong): (Vec<_>, Vec<_>) = settings.partition(Result::is_ok);
    (good.into_iter().flatten().collect(), wrong.into_iter().find_map(Result::err))
}

/// Makes the first setting of each flag its default. API server and manifests exclude each other: a setting is ignored
/// where a nearer place has a flag that conflicts with it, unless a flag or a variable excludes that one in turn.
fn with_defaults(mut command: Command, settings: &[GivenSetting]) -> Command {
    let mut nearer = Vec::<Id>::new();
    for GivenSetting { name, value, .. } in settings {
        let Some(flag) = command.get_arguments().find(|flag| flag.get_long() == Some(name)) else { continue };
        let id = flag.get_id().clone();
        if nearer.contains(&id) {
            continue;
        }
        let conflicts = conflicts_of(&command, &id);
        let rivals = conflicts.iter().filter(|&other| nearer.contains(other));
        let excluders: Vec<_> = rivals.flat_map(|rival| conflicts_of(&command, rival)).collect();
        let is_excluded = !excluders.is_empty();
        // Of several conditions, the first that holds counts.
        command = command.mut_arg(&id, |mut flag| {
            for other in conflicts {
                flag = flag.default_value_if(other, ArgPredicate::IsPresent, Resettable::Reset);
            }
            for other in excluders {
                flag = flag.default_value_if(other, ArgPredicate::IsPresent, value.clone());
            }
            if is_excluded { flag } else { flag.required(false).default_value(value.clone()) }
        });
        if !is_excluded {
            nearer.push(id);
        }
    }
    command
}

/// Flags that exclude the one with this id.
fn conflicts_of(command: &Command, id: &Id) -> Vec<Id> {
    let flag = command.get_arguments().find(|flag| flag.get_id() == id);
    let conflicts = flag.map(|flag| command.get_arg_conflicts_with(flag)).unwrap_or_default();
    conflicts.into_iter().map(|other| other.get_id().clone()).collect()
}

/// Parameters for cproxy, up to `--`. A value with spaces is in double quotes, as in the kernel.
fn parse_command_line(command_line: &str) -> Vec<GivenSetting> {
    let mut is_quoted = false;
    let parameters = command_line.split(|char: char| {
        is_quoted ^= char == '"';
        char.is_whitespace() && !is_quoted
    });
    let parameters = parameters.take_while(|&parameter| parameter != "--").map(|parameter| parameter.replace('"', ""));
    let setting = |parameter: String| {
        let (name, value) = parameter.strip_prefix(KERNEL_PREFIX)?.split_once('=')?;
        let place = format!("kernel parameter {KERNEL_PREFIX}{name}");
        (!value.is_empty()).then(|| GivenSetting::new(place, name, value))
    };
    parameters.filter_map(setting).collect()
}

fn parse_file(path: &Path, text: &str) -> (Vec<GivenSetting>, Option<SettingsError>) {
    let text = text.trim_start_matches('\u{feff}');
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    partition(lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).map(|(number, line)| {
        let place = format!("{}, line {number}", path.display());
        match line.split_once('=').map(|(name, value)| (name.trim(), value.trim())) {
            Some((_, value)) if value.contains('\0') => Err(SettingsError::ZeroByte(place)),
            Some((name, value)) if !value.is_empty() => match unquoted(value) {
                None if value.split_whitespace().any(|word| word.starts_with('#')) => {
                    Err(SettingsError::Comment(place, shorten(value)))
                }
                inner => Ok(GivenSetting::new(place, name, inner.unwrap_or(value))),
            },
            _ => Err(SettingsError::NoValue(place, shorten(line))),
        }
    }))
}

/// Text in the quotes of a value that has them.
fn unquoted(value: &str) -> Option<&str> {
    let inner = |quote| value.strip_prefix(quote)?.strip_suffix(quote);
    inner('"').or_else(|| inner('\'')).filter(|inner| !inner.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cli::command, config::SETTINGS};

    fn pairs(settings: &[GivenSetting]) -> Vec<(&str, &str)> {
        settings.iter().map(|setting| (&*setting.name, &*setting.value)).collect()
    }

    fn setting((name, value): (&str, &str)) -> GivenSetting {
        GivenSetting::new("f, line 7".to_owned(), name, value)
    }

    #[test]
    fn kernel_parameters_may_be_quoted() {
        let line = "console=ttyS0 cproxy.apiserver=https://10.0.0.1:6443 \"cproxy.bootstrap=/a b\" \
                    cproxy.node_name=\"n 1\" xcproxy.a=1 cproxy.pod-ip= \
                    cproxy.exclude-port=53,54 -- /app cproxy.mode=fast\n";
        assert_eq!(
            pairs(&parse_command_line(line)),
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
        let file = |text: &str| parse_file(Path::new("f"), text);
        let (settings, wrong) = file("\u{feff}# comment\r\n\r\napiserver = https://h?a=b\r\n  node-name=n\n");
        assert_eq!(pairs(&settings), [("apiserver", "https://h?a=b"), ("node-name", "n")]);
        assert!(wrong.is_none());
        let (settings, _) = file("a = \"/b # c\"\nd = 'e'\nf = \"\"\ng = https://h/#i\n");
        assert_eq!(pairs(&settings), [("a", "/b # c"), ("d", "e"), ("f", "\"\""), ("g", "https://h/#i")]);
        let (settings, wrong) = file("a = 1 # noisy\nb = 2\n");
        assert_eq!(pairs(&settings), [("b", "2")]);
        assert_eq!(wrong.unwrap().to_string(), "f, line 1: comments need their own line: \"1 # noisy\"");
        for text in ["apiserver\na = 1", "a = 1\nnode-name =", "a = 1\n[section]", "a = 1\nb = 1\0"] {
            let (settings, wrong) = file(text);
            assert_eq!(pairs(&settings), [("a", "1")], "the rest counts");
            assert!(wrong.unwrap().to_string().starts_with("f, line "), "{text}");
        }
        assert!(file(&"x".repeat(1 << 20)).1.unwrap().to_string().len() < 200);
    }

    #[test]
    fn a_file_that_would_block_is_refused() {
        let path = env::temp_dir().join(format!("cproxy-settings-{}", std::process::id()));
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let (settings, error) = read_file(Some(path.clone()));
        fs::remove_file(&path).unwrap();
        assert!(settings.is_empty() && error.unwrap().to_string().ends_with("cannot be read: not a regular file"));
    }

    /// Some flags of `run`, from the command line and the settings.
    fn parsed(arguments: &[&str], settings: &[(&str, &str)]) -> Vec<String> {
        let settings: Vec<_> = settings.iter().copied().map(setting).collect();
        let cli = command().mut_subcommands(|command| with_defaults(command, &settings));
        let matches = cli.try_get_matches_from([&["cproxy", "run"], arguments].concat()).unwrap();
        let flag = |id: &str| {
            let values = matches.subcommand_matches("run")?.get_raw(id)?.map(|value| value.to_str().unwrap());
            Some(format!("{id}={}", values.collect::<Vec<_>>().join("+")))
        };
        ["apiserver", "manifests", "exclude_port", "node_name"].into_iter().filter_map(flag).collect()
    }

    #[test]
    fn the_nearest_setting_counts_and_no_source_is_set_beside_another() {
        let (kernel, file) = ("https://kernel", "https://file");
        let settings = [("apiserver", kernel), ("apiserver", file), ("manifests", "file")];
        assert_eq!(parsed(&[], &settings), ["apiserver=https://kernel"]);
        assert_eq!(parsed(&["--manifests", "flag"], &settings), ["manifests=flag"]);
        assert_eq!(parsed(&["--apiserver", "https://flag"], &settings), ["apiserver=https://flag"]);
        assert_eq!(parsed(&["--kubeconfig", "flag"], &settings[2..]), [""; 0]);
        assert_eq!(parsed(&["--node-name", "n"], &settings), ["apiserver=https://kernel", "node_name=n"]);
        let settings = [("manifests", "a,b"), ("apiserver", file)];
        assert_eq!(parsed(&[], &settings), ["manifests=a+b"]);
        assert_eq!(parsed(&["--tls-server-name", "flag"], &settings), ["apiserver=https://file"], "no manifests count");
        assert_eq!(parsed(&["--manifests", "flag"], &settings), ["manifests=flag"]);
        let settings = [("tls-server-name", "kernel"), ("manifests", "file"), ("apiserver", file)];
        assert_eq!(parsed(&[], &settings), ["apiserver=https://file"], "ignored manifests exclude nothing");
    }

    #[test]
    fn settings_are_parsed_like_flags() {
        let settings = [("exclude-port", "53,54"), ("node-name", "n")];
        assert_eq!(parsed(&[], &settings), ["exclude_port=53+54", "node_name=n"]);
        assert_eq!(parsed(&["--exclude-port", "80", "--node-name=m"], &settings), ["exclude_port=80", "node_name=m"]);
    }

    #[test]
    fn of_two_in_one_place_the_last_counts() {
        let kernel = parse_command_line("cproxy.node-name=k cproxy.exclude-port=1 cproxy.node-name=l");
        let (file, _) = parse_file(Path::new("f"), "node-name = f\nmanifests = a\nmanifests = b\n");
        let settings = nearest_first(kernel, file);
        assert_eq!(parsed(&[], &pairs(&settings)), ["manifests=b", "exclude_port=1", "node_name=l"]);
    }

    #[test]
    fn two_sources_in_one_place_exclude_each_other() {
        let cli = command();
        let conflict_in = |text: &str| {
            let error = conflict(&cli, &parse_file(Path::new("f"), text).0);
            error.map(|error| error.to_string())
        };
        let error = "f, line 3: apiserver cannot be used with manifests (f, line 1): remove one of the two";
        assert_eq!(conflict_in("manifests = a\n\napiserver = https://h\n").as_deref(), Some(error));
        assert!(conflict_in("kubeconfig = k\nmanifests = a\n").is_some());
        assert_eq!(conflict_in("kubeconfig = k\napiserver = https://h\nmanifest = a\n"), None);
    }

    #[test]
    fn an_invalid_setting_is_left_out_and_its_place_named() {
        let settings = [("balance", "hope"), ("apiserver", "https://1.2.3.4"), ("for", "web"), ("api-server", "x")];
        let (valid, error) = validate(&command(), settings.map(setting).into());
        // `wait` checks values of --for and --timeout itself.
        assert_eq!(pairs(&valid), [("apiserver", "https://1.2.3.4"), ("for", "web")]);
        let error = error.unwrap().to_string();
        assert!(error.starts_with("f, line 7: invalid value 'hope' for '--balance <METHOD>' [possible"), "{error}");
        let (_, error) = validate(&command(), vec![setting(("exclude-port", "53 54"))]);
        let error = error.unwrap().to_string();
        assert!(error.ends_with(": expected a port from 1 to 65535; separate several with commas"), "{error}");
        let long = "x".repeat(1 << 20);
        for name in ["balance", "kubeconfig"] {
            let error = validate(&command(), vec![setting((name, &long))]).1.unwrap().to_string();
            assert!(error.len() < 300 && error.contains(name), "{error:.1000}");
        }
        let long = "x".repeat(VALUE_BYTES_MAX);
        for (name, flag) in [("balance", "--balance <METHOD>"), ("exclude-port", "--exclude-port <PORT>")] {
            let error = validate(&command(), vec![setting((name, &long))]).1.unwrap().to_string();
            assert!(error.len() < 300 && error.contains(flag), "{error:.1000}");
        }
        let long = ["x", "x ", "x'", "https://x", "x:", "1.2.3.4"].map(|text| text.repeat(500));
        for group in SETTINGS {
            for (name, value) in group.settings.iter().flat_map(|of| long.iter().map(|long| (of.name, long))) {
                let (_, error) = validate(&command(), vec![setting((name, value))]);
                let error = error.map(|error| error.to_string()).unwrap_or_default();
                assert!(error.len() < 500, "{name}: {error:.1000}");
            }
        }
        let (_, error) = validate(&command(), vec![setting(("api-server", "x"))]);
        let error = error.unwrap().to_string();
        assert!(error.starts_with("f, line 7: \"api-server\" is not a setting; ") && error.contains(": apiserver, "));
    }
}
