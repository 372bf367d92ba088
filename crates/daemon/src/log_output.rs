//! Standard error as the place of log lines that nobody may wait for: a console or pipe that is full because nobody
//! reads it takes no line, and the line is left out and counted.

use std::{
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FileType, Mode, OFlags, fstat, open},
    io::Errno,
    net::{SendFlags, send},
};
use tokio::runtime::Handle;

/// Bytes that a pipe takes at once if it takes any (pipe(7)).
const PIPE_BYTES: usize = 4096;

/// Lines that were left out since the start.
static LEFT_OUT: AtomicU64 = AtomicU64::new(0);

static OUTPUT: OnceLock<LogOutput> = OnceLock::new();

/// Standard error.
#[derive(Debug)]
pub(crate) struct LogOutput {
    way: Way,
    /// Number of lines left out that the log has not told of.
    untold: AtomicU64,
    /// The last line was written in part.
    is_torn: AtomicBool,
}

/// Way to write without waiting.
#[derive(Debug)]
enum Way {
    /// Standard error, opened once more: others that have it may wait, as they like.
    Opened(OwnedFd),
    /// A socket, which cannot be opened.
    Socket,
    /// A file, whose writes wait for nobody, or what cannot be opened once more. It is asked before each write whether
    /// it takes something.
    Polled,
}

/// Lines of the log that were left out since the start, because nobody read it or it could not be written.
#[must_use]
pub fn log_lines_left_out() -> u64 {
    LEFT_OUT.load(Ordering::Relaxed)
}

/// Writes a line to standard error in the same way, beside the log.
pub fn write_stderr_line(line: &str) {
    LogOutput::get().write(format!("{line}\n").as_bytes());
}

impl LogOutput {
    /// Standard error of this process.
    pub(crate) fn get() -> &'static Self {
        OUTPUT.get_or_init(|| Self::of(io::stderr().as_fd(), "/proc/self/fd/2"))
    }

    fn of(stderr: BorrowedFd<'_>, path: &str) -> Self {
        let kind = fstat(stderr).map(|status| FileType::from_raw_mode(status.st_mode));
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::APPEND;
        let way = match kind {
            Ok(FileType::Socket) => Way::Socket,
            Ok(FileType::Fifo | FileType::CharacterDevice) => {
                open(path, flags, Mode::empty()).map_or(Way::Polled, Way::Opened)
            }
            _ => Way::Polled,
        };
        Self { way, untold: AtomicU64::new(0), is_torn: AtomicBool::new(false) }
    }

    /// Writes lines, or leaves them out.
    fn write(&self, lines: &[u8]) {
        self.write_to(io::stderr().as_fd(), lines);
    }

    fn write_to(&self, stderr: BorrowedFd<'_>, lines: &[u8]) {
        // Ends a line that was written in part.
        if self.is_torn.load(Ordering::Relaxed) && self.write_some(stderr, b"\n") != Ok(1) {
            return self.leave_out();
        }
        self.is_torn.store(false, Ordering::Relaxed);
        match self.write_some(stderr, lines) {
            Ok(length) if length == lines.len() => self.tell(),
            Ok(length) => {
                self.is_torn.store(length > 0, Ordering::Relaxed);
                self.leave_out();
            }
            Err(_) => self.leave_out(),
        }
    }

    fn write_some(&self, stderr: BorrowedFd<'_>, mut lines: &[u8]) -> Result<usize, Errno> {
        let length = lines.len();
        while !lines.is_empty() {
            let written = match &self.way {
                Way::Opened(file) => rustix::io::write(file, lines),
                Way::Socket => send(stderr, lines, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
                Way::Polled => {
                    let mut files = [PollFd::from_borrowed_fd(stderr, PollFlags::OUT)];
                    match poll(&mut files, Some(&Timespec::default())) {
                        Ok(1) => rustix::io::write(stderr, lines.get(..PIPE_BYTES).unwrap_or(lines)),
                        Ok(_) => Err(Errno::AGAIN),
                        Err(error) => Err(error),
                    }
                }
            };
            match written {
                Ok(0) => break,
                Ok(written) => lines = lines.get(written..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(error) if lines.len() == length => return Err(error),
                Err(_) => break,
            }
        }
        Ok(length - lines.len())
    }

    fn leave_out(&self) {
        LEFT_OUT.fetch_add(1, Ordering::Relaxed);
        self.untold.fetch_add(1, Ordering::Relaxed);
    }

    /// Has the log tell, once lines can be written again, how many were left out.
    fn tell(&self) {
        if self.untold.load(Ordering::Relaxed) == 0 {
            return;
        }
        let count = self.untold.swap(0, Ordering::Relaxed);
        let line = async move {
            tracing::warn!("{count} lines were left out: nobody read the log, or it could not be written");
        };
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(line)),
            Err(_) => drop(self.untold.fetch_add(count, Ordering::Relaxed)),
        }
    }
}

impl Write for &LogOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LogOutput::write(self, bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read, os::fd::AsRawFd, os::unix::net::UnixStream};

    use rustix::{io::dup, pipe::pipe};

    use super::*;

    fn output_of(file: BorrowedFd<'_>) -> LogOutput {
        LogOutput::of(file, &format!("/proc/self/fd/{}", file.as_raw_fd()))
    }

    fn untold(output: &LogOutput) -> u64 {
        output.untold.load(Ordering::Relaxed)
    }

    #[test]
    fn a_pipe_that_nobody_reads_takes_no_time() {
        let (reader, writer) = pipe().unwrap();
        let output = output_of(writer.as_fd());
        assert!(matches!(output.way, Way::Opened(_)));
        let polled = LogOutput { way: Way::Polled, ..output_of(writer.as_fd()) };
        let line = [&[b'a'; 999][..], b"\n"].concat();
        for _ in 0..200 {
            output.write_to(writer.as_fd(), &line);
        }
        polled.write_to(writer.as_fd(), &line);
        let left_out = untold(&output);
        assert!((130..140).contains(&left_out) && untold(&polled) == 1, "{left_out}");
        drop(output);
        drop(polled);
        drop(writer);
        let mut text = String::new();
        File::from(reader).read_to_string(&mut text).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len() as u64, 200 - left_out);
        assert!(lines.iter().all(|line| line.len() == 999), "no line is cut");
    }

    #[test]
    fn a_line_that_is_torn_ends_before_the_next() {
        let (reader, writer) = pipe().unwrap();
        let output = output_of(writer.as_fd());
        // Longer than what a pipe takes as a whole.
        let long = [&[b'a'; 99_999][..], b"\n"].concat();
        output.write_to(writer.as_fd(), &long);
        assert_eq!(untold(&output), 1);
        let mut reader = File::from(reader);
        reader.read_exact(&mut vec![0; 60_000]).unwrap();
        output.write_to(writer.as_fd(), b"next\n");
        drop((output, writer));
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert!(text.ends_with("a\nnext\n"), "{:?}", text.split_at(text.len() - 10).1);
    }

    #[test]
    fn sockets_files_and_full_devices_are_written_without_waiting() {
        let (reader, writer) = UnixStream::pair().unwrap();
        let output = output_of(writer.as_fd());
        assert!(matches!(output.way, Way::Socket));
        (0..10_000).for_each(|_| output.write_to(writer.as_fd(), &[b'a'; 1000]));
        assert!(untold(&output) > 0);
        drop(reader);
        output.write_to(writer.as_fd(), b"nobody\n");

        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = output_of(full.as_fd());
        output.write_to(full.as_fd(), b"line\n");
        assert_eq!(untold(&output), 1);

        let path = std::env::temp_dir().join(format!("cproxy-log-output-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        let output = output_of(file.as_fd());
        output.write_to(dup(&file).unwrap().as_fd(), &[b'a'; 10_000]);
        assert_eq!((untold(&output), std::fs::metadata(&path).unwrap().len()), (0, 10_000));
        std::fs::remove_file(&path).unwrap();
    }
}
