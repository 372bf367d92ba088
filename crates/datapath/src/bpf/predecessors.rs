//! Older layouts that this one can take over: what means the same in both, and what has to be kept for their sockets.

use super::map_spec::{TCP_FULL, TCP_MORE_OWNERS, TCP_MORE_PEERS};

/// Layout whose table this one can take over.
#[derive(Clone, Copy, Debug)]
pub(super) struct Predecessor {
    pub(super) layout: u32,
    /// Maps of this layout that it has not, or whose content means something else there.
    pub(super) renewed: &'static [&'static str],
    /// Its links that show or free what those maps have of sockets.
    pub(super) kept_links: &'static [&'static str],
    /// Its maps with state of sockets, which the agent reads meanwhile.
    kept_maps: &'static [&'static str],
}

/// All of them, newest first.
pub(super) const PREDECESSORS: [Predecessor; 2] = [
    Predecessor {
        layout: 7,
        renewed: &["OWN_ADDRESSES", TCP_MORE_OWNERS, TCP_MORE_PEERS, TCP_FULL],
        kept_links: &[],
        kept_maps: &[],
    },
    Predecessor {
        layout: 6,
        // `TCP_OWNERS` can be mapped into memory since.
        renewed: &["OWN_ADDRESSES", "TCP_OWNERS", "TCP_PEERS", TCP_MORE_OWNERS, TCP_MORE_PEERS, TCP_FULL],
        kept_links: &["getpeername4", "getpeername6", "sock_release"],
        kept_maps: &["TCP_OWNERS", "TCP_PEERS"],
    },
];

impl Predecessor {
    /// The one with this layout.
    pub(super) fn of(layout: u32) -> Option<Self> {
        PREDECESSORS.into_iter().find(|predecessor| predecessor.layout == layout)
    }

    /// Whether the link or map with this name stays as it is for the layout's sockets.
    pub(super) fn keeps(self, name: &str) -> bool {
        [self.kept_links, self.kept_maps].iter().any(|kept| kept.contains(&name))
    }
}
