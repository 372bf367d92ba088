//! Exit codes: a contract with scripts and supervisors.

/// A value that is wrong by itself.
pub(super) const USAGE: u8 = 2;
/// cproxy is disabled: a supervisor is not to start it again.
pub(super) const DISABLED: u8 = 3;
/// A question cannot be answered.
pub(super) const NOT_ANSWERED: u8 = 4;
// Those of `exec`, which shells use, too.
pub(super) const NOT_RUN: u8 = 126;
pub(super) const NOT_FOUND: u8 = 127;

/// Codes and their meanings, in Markdown.
pub const EXIT_CODES: [(&[u8], &str); 6] = [
    (&[0], "success; for `run`, ended by a signal"),
    (
        &[1],
        "failure, such as a value that does not fit this machine. For `wait`: not ready in time; for `status`: no \
         agent is ready, or something is not well; for `explain`: a call is refused or dropped, fails at all backends, \
         or is not translated although a Service has the address; for `check`: cproxy cannot run here, or cannot \
         follow the API server of its settings; for `resolve`: a file cannot be read, or `--explain` names a Service \
         that is not served; for `resolve --policy`: traffic is denied",
    ),
    (
        &[USAGE],
        "a value that is wrong by itself: wrong usage, an invalid setting, or, for `run`, one that names something \
         that does not exist or is of another kind",
    ),
    (
        &[DISABLED],
        "from `run`: cproxy is disabled on this machine (`enabled = false`); a supervisor is not to start it again",
    ),
    (
        &[NOT_ANSWERED],
        "from `explain`: it cannot be said what a call gets: no root, no table, no agent for a name, or no Service is \
         known to have the name or the address and not all are known; from `resolve --policy`: a pod is unknown, or \
         has no address or no port of that name, or a file cannot be read",
    ),
    (&[NOT_RUN, NOT_FOUND], "from `exec`: PROGRAM cannot be run, or does not exist"),
];
