//! Addresses of load balancers in the kernel: programs, maps, links and their pins, apart from those of the table.
//!
//! `<pin-dir>/receive-v<layout>/` holds the maps, the programs and the links. The program that looks sockets up is that
//! of policy, too, and has its place among the pins of policy, whose maps are there also without a policy.

mod install;
mod maps;

use std::{
    io,
    path::{Path, PathBuf},
};

use aya_obj::generated::bpf_attach_type;
use cproxy_ebpf::receive::RECEIVE_LAYOUT_VERSION;

pub use self::{
    install::{forget_receive, install_receive, is_receiving},
    maps::{ListeningAt, ReceiveMaps, receive_counters},
};
use super::{
    linked::{LinkedPins, LinkedProgram},
    pins::PinDir,
};

const RECEIVED: &str = "RECEIVED";
const SOURCES: &str = "RECEIVED_SOURCES";
const LISTENERS: &str = "LISTENERS";
const DATAGRAMS: &str = "RECEIVED_DATAGRAMS";
const COUNTERS: &str = "RECEIVE_COUNTERS";
const MAPS: [&str; 5] = [RECEIVED, SOURCES, LISTENERS, DATAGRAMS, COUNTERS];

/// Programs of a cgroup, in the order in which they are attached.
const PROGRAMS: [LinkedProgram; 3] = [
    LinkedProgram { name: "cproxy_receive_so", link: "sock_ops", hook: bpf_attach_type::BPF_CGROUP_SOCK_OPS },
    LinkedProgram { name: "cproxy_receive_s4", link: "sendmsg4", hook: bpf_attach_type::BPF_CGROUP_UDP4_SENDMSG },
    LinkedProgram { name: "cproxy_receive_s6", link: "sendmsg6", hook: bpf_attach_type::BPF_CGROUP_UDP6_SENDMSG },
];

/// Pins for received addresses, beside those of the table.
#[derive(Clone, Debug)]
pub struct ReceivePins(LinkedPins);

impl ReceivePins {
    /// The pins beside a table's; nothing is touched yet.
    #[must_use]
    pub fn new(pins: &PinDir) -> Self {
        Self(LinkedPins::new(pins.directory().join(format!("receive-v{RECEIVE_LAYOUT_VERSION}"))))
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.0.directory()
    }

    /// Whether the programs have been installed there.
    #[must_use]
    pub fn exist(&self) -> bool {
        self.0.directory().exists()
    }

    fn object(&self, name: &str) -> PathBuf {
        self.0.object(name)
    }

    /// Removes all pins: nothing is received any more. The program that looks sockets up is not among them.
    ///
    /// # Errors
    /// A pin stays.
    pub fn remove(&self) -> io::Result<()> {
        self.0.remove(PROGRAMS.into_iter())
    }
}
