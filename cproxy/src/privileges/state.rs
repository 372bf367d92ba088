//! Rights of a running process, as the kernel shows them.

use std::{fmt, fs, io};

use rustix::{process::Pid, thread::CapabilitySet};

use super::Named;

/// `SECCOMP_MODE_FILTER` (include/uapi/linux/seccomp.h).
const MODE_FILTER: u64 = 2;

/// Actions of the kernel for a system call that a filter refuses. The file is absent without CONFIG_SECCOMP_FILTER.
const ACTIONS: &str = "/proc/sys/kernel/seccomp/actions_avail";

/// Rights of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    capabilities: CapabilitySet,
    has_no_new_privileges: bool,
    has_filter: bool,
}

impl Rights {
    /// Those of a process.
    ///
    /// # Errors
    /// It cannot be looked at.
    pub fn of(process: Pid) -> io::Result<Self> {
        let path = format!("/proc/{}/status", process.as_raw_nonzero());
        Self::parse(&fs::read_to_string(path)?).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn parse(status: &str) -> Option<Self> {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let number = |name, radix| u64::from_str_radix(field(name)?.trim(), radix).ok();
        Some(Self {
            capabilities: CapabilitySet::from_bits_retain(number("CapPrm", 16)?),
            has_no_new_privileges: number("NoNewPrivs", 10) == Some(1),
            // A kernel without filters has no such field.
            has_filter: number("Seccomp", 10) == Some(MODE_FILTER),
        })
    }

    /// Whether its capabilities are few, and its system calls are filtered.
    #[must_use]
    pub fn are_confined(&self) -> bool {
        let strange = super::ALWAYS.iter().chain([&super::UNIX_SOCKETS]);
        let strange = strange.fold(self.capabilities, |rest, (one, _)| rest - *one);
        strange.is_empty() && self.has_no_new_privileges && self.has_filter
    }
}

impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Named(self.capabilities))?;
        f.write_str(if self.has_no_new_privileges { "; no new privileges" } else { "; new privileges are possible" })?;
        f.write_str(if self.has_filter { "; system calls are filtered" } else { "; system calls are not filtered" })
    }
}

/// Whether the kernel can filter system calls.
#[must_use]
pub fn can_filter_system_calls() -> bool {
    fs::exists(ACTIONS).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tcproxy\nCapPrm:\t000000c000281004\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n";

    #[test]
    fn rights_are_read_and_judged() {
        let confined = Rights::parse(STATUS).unwrap();
        assert!(confined.are_confined());
        assert_eq!(
            confined.to_string(),
            "CAP_BPF CAP_NET_ADMIN CAP_PERFMON CAP_SYS_ADMIN CAP_SYS_PTRACE CAP_DAC_READ_SEARCH; no new privileges; \
             system calls are filtered"
        );
        for (from, to, words) in [
            ("c000281004", "1ffffffffff", "and 34 more capabilities; no new privileges; "),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0", "; new privileges are possible; "),
            ("Seccomp:\t2\n", "", "; system calls are not filtered"),
        ] {
            let rights = Rights::parse(&STATUS.replace(from, to)).unwrap();
            assert!(!rights.are_confined() && rights.to_string().contains(words), "{rights}");
        }
        assert_eq!(Rights::parse("Name:\tcproxy\n"), None);
    }
}
