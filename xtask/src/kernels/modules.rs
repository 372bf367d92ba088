//! The modules that a guest with a distribution's kernel needs, and their dependencies.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

/// The network card and the vsock device of a virtual machine, and the interfaces that list sockets for the agent.
pub(super) const GUEST: [&str; 6] =
    ["virtio_pci", "virtio_net", "vmw_vsock_virtio_transport", "inet_diag", "tcp_diag", "udp_diag"];

/// Modules of kube-proxy's rules, in all its modes, and of the links to its pods.
pub(super) const KUBE_PROXY: [&str; 48] = [
    "veth",
    "dummy",
    "ip_tables",
    "iptable_filter",
    "iptable_mangle",
    "iptable_nat",
    "ip6_tables",
    "ip6table_filter",
    "ip6table_mangle",
    "ip6table_nat",
    "ipt_REJECT",
    "ip6t_REJECT",
    "nf_conntrack",
    "nf_conntrack_netlink",
    "nf_nat",
    "xt_addrtype",
    "xt_comment",
    "xt_conntrack",
    "xt_mark",
    "xt_MASQUERADE",
    "xt_multiport",
    "xt_nat",
    "xt_recent",
    "xt_set",
    "xt_statistic",
    "xt_tcpudp",
    "ip_set",
    "ip_set_bitmap_port",
    "ip_set_hash_ip",
    "ip_set_hash_ipport",
    "ip_set_hash_ipportip",
    "ip_set_hash_ipportnet",
    "ip_set_hash_net",
    "ip_vs",
    "ip_vs_lc",
    "ip_vs_rr",
    "ip_vs_sh",
    "ip_vs_wrr",
    "nf_tables",
    "nft_chain_nat",
    "nft_ct",
    "nft_fib_inet",
    "nft_hash",
    "nft_masq",
    "nft_nat",
    "nft_numgen",
    "nft_reject_ipv4",
    "nft_reject_ipv6",
];

/// Files of modules by their names, as the kernel has them.
type Files = BTreeMap<String, PathBuf>;

/// Copies the wanted modules below `from` and their dependencies to `to`, numbered in the order of loading.
pub(super) fn copy_with_dependencies(from: &Path, to: &Path, wanted: &[&str]) -> Result<()> {
    let mut files = Files::new();
    collect(from, &mut files)?;
    fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    let mut order = Vec::new();
    for name in wanted {
        add(name, &files, &mut order)?;
    }
    for (number, (name, content)) in order.iter().enumerate() {
        let path = to.join(format!("{number:03}-{name}.ko"));
        fs::write(&path, content).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn collect(directory: &Path, files: &mut Files) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))? {
        let path = entry.context("reading a directory entry")?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if let Some((name, _)) = path.file_name().and_then(|name| name.to_str()?.split_once(".ko")) {
            files.insert(name.replace('-', "_"), path);
        }
    }
    Ok(())
}

/// Adds a module behind its dependencies. A module without a file is built into the kernel.
fn add(name: &str, files: &Files, order: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    let Some(path) = files.get(name).filter(|_| !order.iter().any(|(known, _)| known == name)) else { return Ok(()) };
    let content = read(path)?;
    for needed in dependencies(&content) {
        add(&needed, files, order)?;
    }
    order.push((name.to_owned(), content));
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    if path.extension().is_some_and(|extension| extension == "xz") {
        let output = Command::new("xz").arg("-dc").arg(path).output().context("cannot start `xz`")?;
        ensure!(output.status.success(), "xz -dc {} failed", path.display());
        return Ok(output.stdout);
    }
    fs::read(path).with_context(|| format!("reading {}", path.display()))
}

/// Dependencies in a module's section `.modinfo`: texts with a zero byte behind each.
fn dependencies(content: &[u8]) -> Vec<String> {
    let list = content.split(|&byte| byte == 0).find_map(|text| text.strip_prefix(b"depends="));
    let names = String::from_utf8_lossy(list.unwrap_or_default()).into_owned();
    names.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_modules_needs_are_in_its_information() {
        assert_eq!(
            dependencies(b"\x7fELF\0license=GPL\0depends=virtio-ring,net_failover\0x\0"),
            ["virtio_ring", "net_failover"]
        );
        assert_eq!(dependencies(b"\0depends=\0"), [""; 0]);
        assert_eq!(dependencies(b"\0license=GPL\0"), [""; 0]);
    }
}
