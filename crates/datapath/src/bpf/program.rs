//! The programs by name, each with the name of its link.

/// One of our programs and its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// The function's name, which `bpftool prog` shows.
    pub name: &'static str,
    /// The name under which its link is pinned.
    pub link: &'static str,
}

impl Program {
    /// All programs.
    pub const ALL: [Self; 9] = [
        Self { name: "cproxy_connect4", link: "connect4" },
        Self { name: "cproxy_connect6", link: "connect6" },
        Self { name: "cproxy_send4", link: "sendmsg4" },
        Self { name: "cproxy_send6", link: "sendmsg6" },
        Self { name: "cproxy_recv4", link: "recvmsg4" },
        Self { name: "cproxy_recv6", link: "recvmsg6" },
        Self { name: "cproxy_peer4", link: "getpeername4" },
        Self { name: "cproxy_peer6", link: "getpeername6" },
        Self { name: "cproxy_release", link: "sock_release" },
    ];

    /// Behind a link's name while it is not yet in its place.
    const NEW_SUFFIX: &str = "_new";

    /// The names of all links.
    #[must_use]
    pub fn links() -> [&'static str; Self::ALL.len()] {
        Self::ALL.map(|program| program.link)
    }

    /// The name under which its link is pinned before it takes the place of another one.
    pub(super) fn new_link(&self) -> String {
        format!("{}{}", self.link, Self::NEW_SUFFIX)
    }

    /// Whether a link has this name, or has it before it takes its place.
    pub(super) fn has_link(name: &str) -> bool {
        let name = name.strip_suffix(Self::NEW_SUFFIX).unwrap_or(name);
        Self::ALL.iter().any(|program| program.link == name)
    }
}
