//! The kernel's interface for stopped system calls (seccomp_unotify(2)).

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr,
};

use rustix::io::Errno;
use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, SeccompRule};

/// Listener of a filter.
#[derive(Debug)]
pub(super) struct Listener(OwnedFd);

/// Call at which a thread waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    id: u64,
    /// The thread, as the broker sees it.
    pub(super) thread: u32,
    /// Number of the call.
    pub(super) number: libc::c_long,
    /// Arguments.
    pub(super) arguments: [u64; 6],
}

/// Outcome of a call.
#[derive(Debug)]
pub(super) enum Outcome {
    /// It has succeeded, and returns 0.
    Done,
    /// It returns a new descriptor.
    Descriptor(OwnedFd),
}

impl Listener {
    pub(super) fn new(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }

    /// Waits for the next call.
    pub(super) fn next(&self) -> Result<Call, Errno> {
        let mut call = MaybeUninit::<libc::seccomp_notif>::zeroed();
        self.control(libc::SECCOMP_IOCTL_NOTIF_RECV, call.as_mut_ptr().cast())?;
        // SAFETY: integers only, which the kernel has filled in.
        let call = unsafe { call.assume_init() };
        let number = call.data.nr.into();
        Ok(Call { id: call.id, thread: call.pid, number, arguments: call.data.args })
    }

    /// Whether the thread still waits: only then is what was read of it its own.
    pub(super) fn is_waiting(&self, call: &Call) -> bool {
        let mut id = call.id;
        self.control(libc::SECCOMP_IOCTL_NOTIF_ID_VALID, ptr::from_mut(&mut id).cast()).is_ok()
    }

    /// Ends a call. A thread that waits no more is no error.
    pub(super) fn answer(&self, call: &Call, outcome: Result<Outcome, Errno>) {
        let given = outcome.and_then(|outcome| match outcome {
            Outcome::Done => Ok(0),
            Outcome::Descriptor(descriptor) => self.give(call, descriptor.as_fd()),
        });
        let (val, error) = given.map_or_else(|error| (0, -error.raw_os_error()), |value| (value, 0));
        let mut response = libc::seccomp_notif_resp { id: call.id, val, error, flags: 0 };
        self.control(libc::SECCOMP_IOCTL_NOTIF_SEND, ptr::from_mut(&mut response).cast()).ok();
    }

    /// Gives a descriptor to the process of a call, closed on execve(2). Returns its number there.
    fn give(&self, call: &Call, descriptor: BorrowedFd<'_>) -> Result<i64, Errno> {
        let mut given = libc::seccomp_notif_addfd {
            id: call.id,
            flags: 0,
            srcfd: descriptor.as_raw_fd().unsigned_abs(),
            newfd: 0,
            newfd_flags: libc::O_CLOEXEC.unsigned_abs(),
        };
        self.control(libc::SECCOMP_IOCTL_NOTIF_ADDFD, ptr::from_mut(&mut given).cast()).map(i64::from)
    }

    fn control(&self, request: libc::Ioctl, argument: *mut libc::c_void) -> Result<i32, Errno> {
        // SAFETY: the argument is the structure of the request, and lives until the call returns.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), request, argument) } {
            -1 => Err(last_error()),
            value => Ok(value),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

pub(super) fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Installs a filter in all threads that stops them at these calls, for ever. Returns its listener.
///
/// # Errors
/// The kernel refuses.
pub(super) fn install(calls: Vec<(libc::c_long, Vec<SeccompRule>)>) -> Result<OwnedFd, String> {
    let program = program(calls).map_err(|error| error.to_string())?;
    let length = u16::try_from(program.len()).map_err(|error| error.to_string())?;
    // The library has a type of its own of the same layout.
    let filter = libc::sock_fprog { len: length, filter: program.as_ptr().cast_mut().cast() };
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER
        | libc::SECCOMP_FILTER_FLAG_TSYNC
        | libc::SECCOMP_FILTER_FLAG_TSYNC_ESRCH;
    // Since 5.19: no signal breaks off a call that the broker has already made.
    [flags | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, flags]
        .into_iter()
        .find_map(|flags| {
            // SAFETY: the program and its instructions live until the call returns; the kernel copies both.
            let listener =
                unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const filter) };
            let listener = i32::try_from(listener).ok().filter(|listener| *listener >= 0)?;
            // SAFETY: the kernel has just returned this descriptor, and nothing else uses it.
            Some(unsafe { OwnedFd::from_raw_fd(listener) })
        })
        .ok_or_else(|| format!("the kernel refuses a filter with a listener: {}", last_error()))
}

/// The library knows no action that notifies. It builds a program with one that stands for it.
fn program(calls: Vec<(libc::c_long, Vec<SeccompRule>)>) -> Result<BpfProgram, BackendError> {
    let architecture = std::env::consts::ARCH.try_into()?;
    let stand_in = SeccompAction::Trace(0);
    let filter = SeccompFilter::new(calls.into_iter().collect(), SeccompAction::Allow, stand_in, architecture)?;
    let mut program = BpfProgram::try_from(filter)?;
    let returns = u16::try_from(libc::BPF_RET | libc::BPF_K).unwrap_or_default();
    let stands_in = |code, k| code == returns && k == libc::SECCOMP_RET_TRACE;
    for instruction in program.iter_mut().filter(|instruction| stands_in(instruction.code, instruction.k)) {
        instruction.k = libc::SECCOMP_RET_USER_NOTIF;
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::{super::calls::calls, *};

    #[test]
    fn the_program_notifies_and_traces_nothing() {
        let program = program(calls().unwrap()).unwrap();
        let notifies = |k| program.iter().filter(|instruction| instruction.k == k).count();
        assert!(notifies(libc::SECCOMP_RET_USER_NOTIF) > 0);
        assert_eq!(notifies(libc::SECCOMP_RET_TRACE), 0);
    }
}
