//! Places where the kernel does less than it could.

/// Lets the calling thread, and the threads and processes that it starts from then on, open no netlink sockets.
///
/// # Panics
/// When the kernel does not take the filter.
pub fn forbid_netlink() {
    const fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
        libc::sock_filter { code: code as u16, jt, jf, k }
    }
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const UNLESS: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    // `struct seccomp_data`: the call's number is at 0, the lower half of its first argument at 16 or 20.
    const DOMAIN: u32 = if cfg!(target_endian = "little") { 16 } else { 20 };
    let mut filter = [
        instruction(LOAD, 0, 0, 0),
        instruction(UNLESS, 0, 3, libc::SYS_socket as u32),
        instruction(LOAD, 0, 0, DOMAIN),
        instruction(UNLESS, 0, 1, libc::AF_NETLINK as u32),
        instruction(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPROTONOSUPPORT as u32),
        instruction(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    rustix::thread::set_no_new_privs(true).expect("cannot give up new privileges");
    // SAFETY: the program and what it points to live until the call returns; the kernel copies both.
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}
