//! Seccomp filters that imitate a less capable kernel, or stop a thread at a system call. They are in force for the
//! calling thread and the threads and processes that it starts from then on.

use std::{
    io, mem,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    ptr, slice,
    sync::mpsc,
    thread,
};

use rustix::event::{PollFd, PollFlags, poll};

/// Forbids netlink sockets.
///
/// # Panics
/// When the kernel refuses the filter.
pub fn forbid_netlink() {
    refuse(libc::SYS_socket, &[(0, libc::AF_NETLINK as u32)], libc::EPROTONOSUPPORT);
}

/// Refuses inotify instances, as if the user's programs had used up `fs.inotify.max_user_instances`.
///
/// # Panics
/// When the kernel refuses the filter.
pub fn use_up_inotify_instances() {
    refuse(libc::SYS_inotify_init1, &[], libc::EMFILE);
}

/// Refuses watches of files, as if the user's programs had used up `fs.inotify.max_user_watches`.
///
/// # Panics
/// When the kernel refuses the filter.
pub fn use_up_inotify_watches() {
    refuse(libc::SYS_inotify_add_watch, &[], libc::ENOSPC);
}

/// Forbids further filters, as a kernel without CONFIG_SECCOMP_FILTER does.
///
/// # Panics
/// When the kernel refuses the filter.
pub fn forbid_filters() {
    refuse(libc::SYS_seccomp, &[], libc::EINVAL);
}

/// Refuses memory for maps that the agent creates itself. It passes 44 bytes of a map's description to the kernel; the
/// library that loads the programs passes more.
///
/// # Panics
/// When the kernel refuses the filter.
pub fn forbid_maps_of_the_agent() {
    const BPF_MAP_CREATE: u32 = 0;
    refuse(libc::SYS_bpf, &[(0, BPF_MAP_CREATE), (2, 44)], libc::ENOMEM);
}

/// Forbids system calls that write to a BPF map.
///
/// # Panics
/// When the kernel refuses the filter.
pub fn forbid_writes_to_maps() {
    const BPF_MAP_UPDATE_ELEM: u32 = 2;
    const BPF_MAP_DELETE_ELEM: u32 = 3;
    for command in [BPF_MAP_UPDATE_ELEM, BPF_MAP_DELETE_ELEM] {
        refuse(libc::SYS_bpf, &[(0, command)], libc::EPERM);
    }
}

/// Runs `work` on a thread of its own. Each message that it sends to a connected socket goes to `pause` first: the
/// message is sent when that returns.
///
/// # Panics
/// When the kernel refuses the filter.
pub fn pause_before_sends<R: Send>(work: impl FnOnce() -> R + Send, mut pause: impl FnMut(&[u8])) -> R {
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        let working = scope.spawn(move || {
            let filter = filter(libc::SYS_sendto, &[], libc::SECCOMP_RET_USER_NOTIF);
            let listener = install(filter, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
            // SAFETY: the kernel has just made this descriptor for us.
            sender.send(unsafe { OwnedFd::from_raw_fd(listener as RawFd) }).expect("the receiver waits");
            work()
        });
        let listener: OwnedFd = receiver.recv().expect("the kernel has refused the filter");
        while let Some(call) = next_call(&listener) {
            let [_, message, length, ..] = call.data.args;
            let message = ptr::with_exposed_provenance(message as usize);
            // SAFETY: the call's arguments are a thread's of this process, which waits for the end of the call.
            pause(unsafe { slice::from_raw_parts(message, length as usize) });
            let flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
            let mut response = libc::seccomp_notif_resp { id: call.id, val: 0, error: 0, flags };
            control(&listener, libc::SECCOMP_IOCTL_NOTIF_SEND, &mut response).expect("the call waits");
        }
        working.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// The next call that waits; none when all threads with the filter have ended.
fn next_call(listener: &OwnedFd) -> Option<libc::seccomp_notif> {
    let mut polled = [PollFd::new(listener, PollFlags::IN)];
    poll(&mut polled, None).expect("a listener can be polled");
    if !polled[0].revents().contains(PollFlags::IN) {
        return None;
    }
    // SAFETY: integers only.
    let mut call: libc::seccomp_notif = unsafe { mem::zeroed() };
    control(listener, libc::SECCOMP_IOCTL_NOTIF_RECV, &mut call).expect("a call waits");
    Some(call)
}

fn control<T>(listener: &OwnedFd, request: libc::Ioctl, argument: &mut T) -> io::Result<()> {
    // SAFETY: the argument is the structure of the request, and lives until the call returns.
    let result = unsafe { libc::ioctl(listener.as_raw_fd(), request, ptr::from_mut(argument)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes a call fail if the lower halves of its arguments, by index, have these values.
fn refuse(call: libc::c_long, arguments: &[(u32, u32)], errno: i32) {
    install(filter(call, arguments, libc::SECCOMP_RET_ERRNO | errno as u32), 0);
}

/// A filter with an action for a call if the lower halves of its arguments, by index, have these values.
fn filter(call: libc::c_long, arguments: &[(u32, u32)], action: u32) -> Vec<libc::sock_filter> {
    const fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
        libc::sock_filter { code: code as u16, jt, jf, k }
    }
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const UNLESS: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    // `struct seccomp_data` has the call's number at 0 and its first argument's lower half at 16 or 20.
    const FIRST: u32 = if cfg!(target_endian = "little") { 16 } else { 20 };
    let arguments = arguments.iter().map(|&(index, value)| (FIRST + 8 * index, value));
    let compared: Vec<_> = std::iter::once((0, call as u32)).chain(arguments).collect();
    let mut filter = Vec::new();
    for (index, &(offset, value)) in compared.iter().enumerate() {
        let to_the_end = 2 * (compared.len() - index) as u8 - 1;
        filter.extend([instruction(LOAD, 0, 0, offset), instruction(UNLESS, 0, to_the_end, value)]);
    }
    filter.extend([instruction(RETURN, 0, 0, action), instruction(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW)]);
    filter
}

/// Installs a filter, and gives up new privileges. With a flag that asks for a listener, returns that.
fn install(filter: Vec<libc::sock_filter>, flags: libc::c_ulong) -> libc::c_long {
    rustix::thread::set_no_new_privs(true).expect("cannot give up new privileges");
    load(&filter, flags).unwrap_or_else(|error| panic!("the kernel refuses a filter: {error}"))
}

/// Loads a filter, which takes CAP_SYS_ADMIN if the process may yet gain privileges.
///
/// # Errors
/// When the kernel refuses it.
pub(crate) fn load(filter: &[libc::sock_filter], flags: libc::c_ulong) -> io::Result<libc::c_long> {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the program and its instructions live until the call returns; the kernel copies both.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A filter that stops a traced process at these calls.
#[cfg(target_arch = "x86_64")]
pub(crate) fn tracing_filter(calls: &[libc::c_long]) -> Vec<libc::sock_filter> {
    let instruction = |code: u32, jt: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf: 0, k };
    let mut filter = vec![instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (index, &call) in calls.iter().enumerate() {
        let to_the_end = calls.len() - index;
        filter.push(instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, to_the_end as u8, call as u32));
    }
    let end = |action| instruction(libc::BPF_RET | libc::BPF_K, 0, action);
    filter.extend([end(libc::SECCOMP_RET_ALLOW), end(libc::SECCOMP_RET_TRACE)]);
    filter
}
