//! System calls at which the agent's filter stops.

use seccompiler::{BackendError, SeccompCmpArgLen as Length, SeccompCmpOp as Op, SeccompCondition, SeccompRule};

use super::super::system_calls::CREATE_FLAGS;

/// Calls with any arguments: those that change names, and that duplicate another process's descriptor. bind(2) makes
/// the file of a unix socket, and fchmod(2) is for its mode.
const ANY: &[libc::c_long] = &[
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_pidfd_getfd,
    libc::SYS_fchmod,
    libc::SYS_bind,
];

/// Older forms of calls that aarch64 does not have.
#[cfg(target_arch = "x86_64")]
const ANY_OF_ARCHITECTURE: &[libc::c_long] = &[libc::SYS_mkdir, libc::SYS_rename, libc::SYS_rmdir, libc::SYS_unlink];
#[cfg(not(target_arch = "x86_64"))]
const ANY_OF_ARCHITECTURE: &[libc::c_long] = &[];

/// The calls, each with the arguments that it is stopped at; none: with any.
pub(super) fn calls() -> Result<Vec<(libc::c_long, Vec<SeccompRule>)>, BackendError> {
    let creates = |flags| {
        let op = Op::MaskedEq(CREATE_FLAGS as u64);
        Ok(vec![SeccompRule::new(vec![SeccompCondition::new(flags, Length::Dword, op, CREATE_FLAGS as u64)?])?])
    };
    let mut calls: Vec<_> = ANY.iter().chain(ANY_OF_ARCHITECTURE).map(|&call| (call, Vec::new())).collect();
    calls.push((libc::SYS_openat, creates(2)?));
    #[cfg(target_arch = "x86_64")]
    calls.push((libc::SYS_open, creates(1)?));
    Ok(calls)
}
