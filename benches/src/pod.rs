//! A pod with a network namespace, a cgroup and an agent of its own, on a link to the sandbox.

use std::{
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use cproxy_tests::{
    process::Agent,
    sandbox::{Netns, Sandbox},
};

/// Address of the first pod.
const FIRST_POD: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 1);

/// A network namespace and a cgroup, with the pins of an agent that attaches its programs there.
#[derive(Debug)]
pub struct Pod {
    /// Its address.
    pub address: Ipv4Addr,
    /// Its network namespace.
    pub netns: Netns,
    /// Its cgroup.
    pub cgroup: PathBuf,
    /// The agent's pin directory.
    pub pin_dir: PathBuf,
    run_dir: PathBuf,
}

impl Pod {
    /// The pod of this number, which the sandbox calls from the address `from`.
    ///
    /// # Errors
    /// A directory cannot be made.
    pub fn new(sandbox: &Sandbox, number: u8, from: Ipv4Addr) -> Result<Self> {
        let address = Ipv4Addr::from_bits(FIRST_POD.to_bits() + u32::from(number));
        let (netns, name) = (sandbox.empty_neighbour(), format!("pod-{number}"));
        sandbox.ip(&format!(
            "link add {name} type veth peer name eth0 netns {}\nlink set {name} up\n\
             route add {address} dev {name} src {from}\n",
            netns.path().display(),
        ));
        sandbox.ip_in(
            &netns,
            &format!(
                "link set lo up\naddress add {address}/32 dev eth0\nlink set eth0 up\n\
                 route add default dev eth0 src {address}\n"
            ),
        );
        let (cgroup, run_dir) = (sandbox.cgroup().join(&name), sandbox.dir().join(format!("run-{name}")));
        for directory in [&cgroup, &run_dir] {
            fs::create_dir(directory).with_context(|| format!("creating {}", directory.display()))?;
        }
        Ok(Self { address, netns, cgroup, pin_dir: sandbox.pin_dir().with_file_name(name), run_dir })
    }

    /// An agent without a source in this pod.
    pub fn agent<'s>(&self, sandbox: &'s Sandbox) -> Agent<'s> {
        let agent = Agent::new(sandbox).netns(&self.netns).cgroup(&self.cgroup);
        agent.pin_dir(&self.pin_dir).run_dir(&self.run_dir).arg("--pod-ip").arg(self.address.to_string())
    }

    /// Makes sockets as the pod does: in its network namespace and its cgroup. The process stays in that cgroup.
    ///
    /// # Errors
    /// The process cannot be moved.
    pub fn run<R: Send>(&self, make: impl FnOnce() -> R + Send) -> Result<R> {
        enter(&self.cgroup)?;
        Ok(self.netns.run(make))
    }
}

/// Moves this process to a cgroup, which its later sockets belong to.
///
/// # Errors
/// It cannot be moved.
pub fn enter(cgroup: &Path) -> Result<()> {
    // "0" is the writing process.
    fs::write(cgroup.join("cgroup.procs"), "0").with_context(|| format!("moving to {}", cgroup.display()))
}
