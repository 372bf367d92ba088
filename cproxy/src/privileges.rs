//! Rights of the agent: the capabilities that its configuration needs, no new privileges, and after the start only the
//! system calls that it makes (docs/decisions/033).

mod broker;
mod state;
mod system_calls;

use std::{fmt, path::Path};

pub use broker::{Broker, run_child, serve as serve_as_broker};
use cproxy_wire::ServerAddress;
use rustix::{
    fs::{Access, AtFlags, CWD, accessat},
    io::Errno,
    thread::{
        CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
        remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
    },
};
pub use state::{Rights, can_filter_system_calls};
pub use system_calls::filter_system_calls;

use crate::config::{Config, ObjectSource};

/// Capabilities of every configuration, with their names. The search for places of TCP sockets needs the last three,
/// also if no stale sockets are closed.
const ALWAYS: [(CapabilitySet, &str); 6] = [
    (CapabilitySet::BPF, "CAP_BPF"),
    // Programs for sockets; closing sockets.
    (CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN"),
    // Programs with functions that take pointers.
    (CapabilitySet::PERFMON, "CAP_PERFMON"),
    // Other network namespaces, and objects of bpf(2) by their ids.
    (CapabilitySet::SYS_ADMIN, "CAP_SYS_ADMIN"),
    // Namespaces and descriptors of other processes.
    (CapabilitySet::SYS_PTRACE, "CAP_SYS_PTRACE"),
    // The same for processes of other users, and their files, such as credentials.
    (CapabilitySet::DAC_READ_SEARCH, "CAP_DAC_READ_SEARCH"),
];

/// Capability for an API server at a Unix socket of another user: to connect, a process must be allowed to write to it.
const UNIX_SOCKETS: (CapabilitySet, &str) = (CapabilitySet::DAC_OVERRIDE, "CAP_DAC_OVERRIDE");

/// Number of capabilities that the kernel's interface has room for.
const CAPABILITIES_MAX: u32 = 64;

/// Capabilities that a configuration needs.
fn needed(config: &Config) -> CapabilitySet {
    let always = ALWAYS.iter().fold(CapabilitySet::empty(), |all, (one, _)| all | *one);
    let has_unix_socket = match &config.source.source() {
        ObjectSource::ApiServer(server) => server.addresses.iter().any(|at| matches!(at, ServerAddress::Unix(_))),
        ObjectSource::Manifests(_) => false,
    };
    if has_unix_socket { always | UNIX_SOCKETS.0 } else { always }
}

/// Gives up all capabilities that the configuration does not need, for ever. Call it while there is one thread: each
/// has capabilities of its own, which those that it starts inherit.
///
/// # Errors
/// The kernel refuses, which it has no reason for.
pub fn give_up_capabilities(config: &Config) -> Result<(), Errno> {
    let needed = needed(config);
    // From now on no program that is started can gain any, whatever the bounding set is.
    set_no_new_privs(true)?;
    for capability in (0..CAPABILITIES_MAX).map(|number| CapabilitySet::from_bits_retain(1 << number)) {
        if needed.contains(capability) || capability_is_in_bounding_set(capability) != Ok(true) {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            // It takes CAP_SETPCAP, which the unit file for systemd does not give.
            Ok(()) | Err(Errno::PERM) => {}
            Err(error) => return Err(error),
        }
    }
    let CapabilitySets { permitted, inheritable, .. } = capabilities(None)?;
    let kept = permitted & needed;
    // A capability that is no longer inheritable leaves the ambient set, too.
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: inheritable & needed })
}

/// Checks that this thread may connect to a Unix socket, which takes write permission: with the capability for it, or
/// by the mode of the file as it is now.
///
/// # Errors
/// The kernel's reason why it may not write to the file, which may not exist.
pub fn check_unix_socket(path: &Path) -> Result<(), Errno> {
    if capabilities(None)?.effective.contains(UNIX_SOCKETS.0) {
        return Ok(());
    }
    accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS)
}

/// Names of capabilities, such as `CAP_BPF`, and the number of those that the agent never needs.
struct Named(CapabilitySet);

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = ALWAYS.iter().chain([&UNIX_SOCKETS]);
        let names: Vec<_> = known.clone().filter(|(one, _)| self.0.contains(*one)).map(|(_, name)| *name).collect();
        let others = known.fold(self.0, |rest, (one, _)| rest - *one).bits().count_ones();
        match (names.as_slice(), others) {
            ([], 0) => f.write_str("no capabilities"),
            (names, 0) => f.write_str(&names.join(" ")),
            (names, others) => write!(f, "{} and {others} more capabilities", names.join(" ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::{fs::PermissionsExt, net::UnixListener},
        thread,
    };

    use super::*;

    #[test]
    fn a_unix_socket_takes_write_permission_or_the_capability() {
        let path = std::env::temp_dir().join(format!("cproxy-unix-socket-{}", std::process::id()));
        let keep = |kept: CapabilitySet| {
            let CapabilitySets { permitted, inheritable, .. } = capabilities(None).unwrap();
            set_capabilities(None, CapabilitySets { effective: permitted & kept, permitted, inheritable }).unwrap();
            permitted.contains(kept)
        };
        // Each thread has capabilities of its own.
        let checked = thread::spawn(move || {
            keep(CapabilitySet::empty());
            assert_eq!(check_unix_socket(&path), Err(Errno::NOENT));
            let _listener = UnixListener::bind(&path).unwrap();
            for (mode, expected) in [(0o700, Ok(())), (0o577, Err(Errno::ACCESS))] {
                fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
                assert_eq!(check_unix_socket(&path), expected, "{mode:o}");
            }
            // An ordinary user does not have it.
            if keep(UNIX_SOCKETS.0) {
                assert_eq!(check_unix_socket(&path), Ok(()));
            }
            fs::remove_file(&path).unwrap();
            assert_eq!(check_unix_socket(&path).is_ok(), keep(UNIX_SOCKETS.0));
        });
        checked.join().unwrap();
    }

    #[test]
    fn capabilities_have_names_and_strange_ones_are_counted() {
        let text = |set| Named(set).to_string();
        assert_eq!(text(CapabilitySet::empty()), "no capabilities");
        assert_eq!(text(CapabilitySet::BPF | CapabilitySet::DAC_OVERRIDE), "CAP_BPF CAP_DAC_OVERRIDE");
        let strange = CapabilitySet::BPF | CapabilitySet::SYS_MODULE | CapabilitySet::CHOWN;
        assert_eq!(text(strange), "CAP_BPF and 2 more capabilities");
    }
}
