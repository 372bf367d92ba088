//! The policy's programs by name, each with the name of its link.

use aya_obj::generated::bpf_attach_type;

/// Program of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyProgram {
    /// The function's name, which `bpftool prog` shows.
    pub name: &'static str,
    /// The name under which its link is pinned.
    pub link: &'static str,
    pub(super) hook: bpf_attach_type,
}

impl PolicyProgram {
    /// Programs for calls of the pod, in the order in which they are attached.
    pub const EGRESS: [Self; 4] = [
        Self { name: "cproxy_policy_c4", link: "connect4", hook: bpf_attach_type::BPF_CGROUP_INET4_CONNECT },
        Self { name: "cproxy_policy_c6", link: "connect6", hook: bpf_attach_type::BPF_CGROUP_INET6_CONNECT },
        Self { name: "cproxy_policy_s4", link: "sendmsg4", hook: bpf_attach_type::BPF_CGROUP_UDP4_SENDMSG },
        Self { name: "cproxy_policy_s6", link: "sendmsg6", hook: bpf_attach_type::BPF_CGROUP_UDP6_SENDMSG },
    ];
    /// Program that makes the sockets of no hook fail.
    pub const SOCK_CREATE: Self =
        Self { name: "cproxy_policy_sk", link: "sock_create", hook: bpf_attach_type::BPF_CGROUP_INET_SOCK_CREATE };
    /// Program for what comes in.
    pub const INGRESS: Self =
        Self { name: "cproxy_policy_in", link: "sk_lookup", hook: bpf_attach_type::BPF_SK_LOOKUP };

    /// All programs.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::EGRESS.into_iter().chain([Self::SOCK_CREATE, Self::INGRESS])
    }

    /// The name under which it is pinned itself.
    pub(super) fn pin(self) -> String {
        format!("prog_{}", self.link)
    }
}
