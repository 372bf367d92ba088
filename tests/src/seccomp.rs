//! Seccomp filters that imitate a less capable kernel, for the calling thread and the threads and processes that it
//! starts from then on.

/// Forbids netlink sockets.
///
/// # Panics
/// When the kernel refuses the filter.
pub fn forbid_netlink() {
    refuse(libc::SYS_socket, &[(0, libc::AF_NETLINK as u32)], libc::EPROTONOSUPPORT);
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

/// Makes a call fail if the lower halves of its arguments, by index, have these values.
fn refuse(call: libc::c_long, arguments: &[(u32, u32)], errno: i32) {
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
    filter.extend([
        instruction(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        instruction(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]);
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    rustix::thread::set_no_new_privs(true).expect("cannot give up new privileges");
    // SAFETY: the program and what it points to live until the call returns; the kernel copies both.
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}
