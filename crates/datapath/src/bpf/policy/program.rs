//! The policy's programs.

use aya_obj::generated::bpf_attach_type;

use crate::bpf::linked::LinkedProgram;

/// Programs for calls of the pod, in the order in which they are attached.
pub(super) const EGRESS: [LinkedProgram; 5] = [
    LinkedProgram { name: "cproxy_policy_c4", link: "connect4", hook: bpf_attach_type::BPF_CGROUP_INET4_CONNECT },
    LinkedProgram { name: "cproxy_policy_c6", link: "connect6", hook: bpf_attach_type::BPF_CGROUP_INET6_CONNECT },
    LinkedProgram { name: "cproxy_policy_s4", link: "sendmsg4", hook: bpf_attach_type::BPF_CGROUP_UDP4_SENDMSG },
    LinkedProgram { name: "cproxy_policy_s6", link: "sendmsg6", hook: bpf_attach_type::BPF_CGROUP_UDP6_SENDMSG },
    LinkedProgram { name: "cproxy_policy_so", link: "setsockopt", hook: bpf_attach_type::BPF_CGROUP_SETSOCKOPT },
];
/// Program that makes the sockets of no hook fail.
pub(super) const SOCK_CREATE: LinkedProgram =
    LinkedProgram { name: "cproxy_policy_sk", link: "sock_create", hook: bpf_attach_type::BPF_CGROUP_INET_SOCK_CREATE };
/// Program for what comes in. In its place is that for received addresses, where there are any.
pub(in crate::bpf) const LOOKUP: LinkedProgram =
    LinkedProgram { name: "cproxy_policy_in", link: "sk_lookup", hook: bpf_attach_type::BPF_SK_LOOKUP };

/// All programs.
pub fn policy_programs() -> impl Iterator<Item = LinkedProgram> {
    EGRESS.into_iter().chain([SOCK_CREATE, LOOKUP])
}
