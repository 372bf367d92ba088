//! New VM generation ids. The driver of the device (Linux 5.18) reseeds the kernel's random numbers, which says so in
//! the kernel's log, and tells user space in no other way: the uevent of 6.8 was reverted.

use std::{io, os::fd::OwnedFd};

use rustix::{
    fs::{Mode, OFlags, SeekFrom, open, seek},
    io::{Errno, read, retry_on_intr},
};
use tokio::io::{Interest, unix::AsyncFd};

/// Message of the kernel (drivers/char/random.c, `add_vmfork_randomness`).
const MESSAGE: &str = "random: crng reseeded due to virtual machine fork";

/// Longest record that the kernel writes (`PRINTK_MESSAGE_MAX`).
const RECORD_BYTES_MAX: usize = 2048;

/// Opens the log at its end. Where `kernel.dmesg_restrict` is set, this needs CAP_SYSLOG.
fn open_at_end() -> io::Result<OwnedFd> {
    let log = open("/dev/kmsg", OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
    seek(&log, SeekFrom::End(0))?;
    Ok(log)
}

/// Checks that the log can be read.
pub(super) fn probe() -> io::Result<()> {
    open_at_end().map(drop)
}

/// The kernel's log, from now on.
pub(in crate::agent) struct KernelLog(AsyncFd<OwnedFd>);

impl KernelLog {
    /// Opens the log. Call it inside a tokio runtime.
    pub(super) fn open() -> io::Result<Self> {
        let log = open_at_end()?;
        // SAFETY: an OwnedFd is the same open descriptor for as long as it lives, and nothing else closes it.
        let log = unsafe { AsyncFd::register_with_interest(log, Interest::READABLE) };
        log.map(Self).map_err(io::Error::from)
    }

    /// Waits for a new VM generation id.
    pub(super) async fn forked(&self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            let mut record = [0; RECORD_BYTES_MAX];
            match retry_on_intr(|| read(self.0.get_ref(), &mut record[..])) {
                Ok(length) if is_fork(record.get(..length).unwrap_or_default()) => return Ok(()),
                // EPIPE: records were overwritten before they were read. EINVAL: the record is longer.
                Ok(1..) | Err(Errno::PIPE | Errno::INVAL) => {}
                Err(Errno::WOULDBLOCK) => ready.clear_ready(),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Whether a record of the kernel's log is the kernel's own message of a new VM generation id. Those of programs have
/// another facility than 0, which the number at the start contains (Documentation/ABI/testing/dev-kmsg).
#[must_use]
pub fn is_fork(record: &[u8]) -> bool {
    // Other bytes than ASCII are escaped.
    let Some((prefix, text)) = str::from_utf8(record).ok().and_then(|record| record.split_once(';')) else {
        return false;
    };
    let number = prefix.split(',').next().and_then(|digits| digits.parse::<u32>().ok());
    number.is_some_and(|number| number < 8) && text.starts_with(MESSAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernels_own_message_counts() {
        let is_fork = |record: &str| is_fork(record.as_bytes());
        assert!(is_fork("5,1234,98765432,-;random: crng reseeded due to virtual machine fork\n"));
        assert!(is_fork(
            "5,1234,98765432,-,caller=T1;random: crng reseeded due to virtual machine fork\n SUBSYSTEM=x\n"
        ));
        assert!(!is_fork("13,1234,98765432,-;random: crng reseeded due to virtual machine fork\n"), "of a program");
        assert!(!is_fork("5,1234,98765432,-;random: crng init done\n"));
        assert!(!is_fork("5,1234,98765432,-"));
        assert!(!is_fork(""));
    }
}
