//! All that support needs, in one tar archive without secrets.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write},
    net::{IpAddr, Ipv6Addr},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::run_dir::{agent, fetch_log, read_states};

/// Longest time of one command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(40);
/// Pause between two looks at a command.
const PAUSE: Duration = Duration::from_millis(10);
/// Bound on one file of the report; a longer one is cut.
const FILE_BYTES_MAX: usize = 16 << 20;

/// Commands whose output is in the report, and the names of its files.
const COMMANDS: [(&str, &[&str]); 12] = [
    ("version.txt", &["version"]),
    ("status.json", &["status", "-o", "json"]),
    ("check.json", &["check", "-o", "json"]),
    ("services.json", &["get", "services", "-o", "json"]),
    ("backends.json", &["get", "backends", "-o", "json"]),
    ("sockets.json", &["get", "sockets", "-o", "json"]),
    ("counters.json", &["get", "counters", "-o", "json"]),
    ("problems.json", &["get", "problems", "-o", "json"]),
    ("policy.json", &["get", "policy", "-o", "json"]),
    ("denials.json", &["get", "denials", "-o", "json"]),
    ("receive.json", &["get", "receive", "-o", "json"]),
    ("config.json", &["get", "config", "-o", "json"]),
];

/// Facts of kernel and machine that are in the report as they are.
const FILES: [&str; 12] = [
    "/proc/version",
    "/proc/meminfo",
    "/proc/uptime",
    "/proc/mounts",
    "/proc/self/cgroup",
    "/proc/cgroups",
    "/proc/net/route",
    "/proc/net/if_inet6",
    "/proc/net/dev",
    "/proc/sys/net/ipv4/ip_local_port_range",
    "/proc/sys/kernel/bpf_stats_enabled",
    "/etc/resolv.conf",
];

/// Report about this machine and its agent.
pub(crate) struct Bugreport<'a> {
    pub(crate) pin_dir: &'a Path,
    pub(crate) run_dir: &'a Path,
    /// Whether numbered names take the place of IP addresses.
    pub(crate) hides_addresses: bool,
    /// Time of its files, in seconds since 1970.
    pub(crate) time_s: u64,
}

impl Bugreport<'_> {
    /// Writes it as a tar archive.
    pub(crate) fn write(&self, output: impl Write) -> io::Result<()> {
        let mut hidden = self.hides_addresses.then(HiddenAddresses::default);
        let mut archive = tar::Builder::new(output);
        for (name, text) in self.contents() {
            let mut text = cproxy_secrets::hidden(&text);
            text.truncate(text.floor_char_boundary(FILE_BYTES_MAX));
            if let Some(hidden) = &mut hidden {
                text = if name.starts_with("proc/net/") { hidden.replaced_hex(&text) } else { hidden.replaced(&text) };
            }
            let mut header = tar::Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(0o600);
            header.set_mtime(self.time_s);
            archive.append_data(&mut header, format!("cproxy-bugreport/{name}"), text.as_bytes())?;
        }
        archive.into_inner()?.flush()
    }

    /// Names and contents of all files.
    fn contents(&self) -> Vec<(String, String)> {
        let Self { pin_dir, run_dir, .. } = *self;
        let mut files: Vec<_> = COMMANDS
            .iter()
            .map(|(name, arguments)| ((*name).to_owned(), output_of(arguments, pin_dir, run_dir)))
            .collect();
        let reason = |error: io::Error| format!("({error})\n");
        files.push(("log.txt".to_owned(), fetch_log(run_dir).unwrap_or_else(reason)));
        files.push(("kernel-parameters.txt".to_owned(), own_parameters()));
        if let Ok(pid) = agent(run_dir) {
            for file in ["status", "limits", "cgroup", "smaps_rollup"] {
                let text = fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_else(reason);
                files.push((format!("agent/{file}"), text));
            }
        }
        files.extend(read_states(run_dir).map(|(name, line)| (format!("run-dir/{name}"), format!("{line}\n"))));
        files.extend(FILES.map(|path| {
            let text = fs::read_to_string(path).unwrap_or_else(reason);
            (path.trim_start_matches('/').to_owned(), text)
        }));
        files
    }
}

/// Output of a command of this program, and its exit code.
fn output_of(arguments: &[&str], pin_dir: &Path, run_dir: &Path) -> String {
    let mut command = Command::new("/proc/self/exe");
    command.args(arguments).env("CPROXY_PIN_DIR", pin_dir).env("CPROXY_RUN_DIR", run_dir).env_remove("CPROXY_OUTPUT");
    let output = match output_in_time(command) {
        Ok(output) => output,
        Err(error) => return format!("({error})\n"),
    };
    let [stdout, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let status = if output.status.success() { String::new() } else { format!("({})\n", output.status) };
    format!("{stdout}{stderr}{status}")
}

fn output_in_time(mut command: Command) -> io::Result<std::process::Output> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let pid = rustix::process::Pid::from_child(&child);
    thread::scope(|scope| {
        let reader = thread::Builder::new().spawn_scoped(scope, || child.wait_with_output())?;
        let end = Instant::now() + COMMAND_TIMEOUT;
        while !reader.is_finished() && Instant::now() < end {
            thread::sleep(PAUSE);
        }
        if !reader.is_finished() {
            // It has not been waited for, so that the id is still its own.
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
        }
        reader.join().unwrap_or_else(|_| Err(io::Error::other("a thread has panicked")))
    })
}

/// Parameters of the kernel's command line that are cproxy's. Others may have secrets.
fn own_parameters() -> String {
    let line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    line.split_whitespace().filter(|word| word.starts_with("cproxy.")).map(|word| format!("{word}\n")).collect()
}

/// Names in the place of addresses.
#[derive(Default)]
struct HiddenAddresses(BTreeMap<IpAddr, usize>);

impl HiddenAddresses {
    fn replaced(&mut self, text: &str) -> String {
        let is_part = |char: char| char.is_ascii_hexdigit() || matches!(char, '.' | ':');
        let mut replaced = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(start) = rest.find(is_part) {
            let (before, from) = rest.split_at(start);
            let length = from.find(|char| !is_part(char)).unwrap_or(from.len());
            let (word, after) = from.split_at(length);
            replaced.push_str(before);
            replaced.push_str(&self.replaced_word(word));
            rest = after;
        }
        replaced.push_str(rest);
        replaced
    }

    /// The same for the kernel's tables, whose addresses are hexadecimal: 32 digits in the network's order, or 8 in
    /// this machine's.
    fn replaced_hex(&mut self, text: &str) -> String {
        let mut replaced = |word: &str| {
            let is_hex = word.bytes().all(|byte| byte.is_ascii_hexdigit());
            let address: Option<IpAddr> = match word.len() {
                32 if is_hex => u128::from_str_radix(word, 16).ok().map(|bits| Ipv6Addr::from_bits(bits).into()),
                8 if is_hex => u32::from_str_radix(word, 16).ok().map(|bits| bits.to_ne_bytes().into()),
                _ => None,
            };
            address.map_or_else(|| word.to_owned(), |address| self.name_of(address))
        };
        text.split_inclusive(char::is_whitespace)
            .map(|piece| {
                let word = piece.trim_end();
                format!("{}{}", replaced(word), piece.get(word.len()..).unwrap_or_default())
            })
            .collect()
    }

    /// An address, perhaps with a port or a colon behind it.
    fn replaced_word(&mut self, word: &str) -> String {
        if let Ok(address) = word.parse() {
            return self.name_of(address);
        }
        match word.rsplit_once(':').map(|(address, port)| (address.parse(), port)) {
            Some((Ok(address), port)) => format!("{}:{port}", self.name_of(address)),
            _ => word.to_owned(),
        }
    }

    fn name_of(&mut self, address: IpAddr) -> String {
        if address.is_loopback() || address.is_unspecified() {
            return address.to_string();
        }
        let next = self.0.len() + 1;
        format!("address-{}", self.0.entry(address).or_insert(next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_the_same_names_everywhere() {
        let mut hidden = HiddenAddresses::default();
        let replaced =
            hidden.replaced("10.96.0.1:80 [fd00::1]:53 fd00::1, 10.96.0.1\n127.0.0.1 ::1 0.0.0.0 12:30:45 face");
        let expected = "address-1:80 [address-2]:53 address-2, address-1\n127.0.0.1 ::1 0.0.0.0 12:30:45 face";
        assert_eq!(replaced, expected);
        assert_eq!(hidden.replaced("fd00:0::1"), "address-2");
        let table = "fd000000000000000000000000000001 02 40\neth0\t0100600A\t00000000\t0003\n";
        assert_eq!(hidden.replaced_hex(table), "address-2 02 40\neth0\taddress-1\t0.0.0.0\t0003\n");
    }
}
