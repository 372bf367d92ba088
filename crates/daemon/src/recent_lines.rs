//! The last lines of a log, for those who ask later.

use std::{
    collections::VecDeque,
    io::{self, Write},
    sync::{Arc, Mutex, PoisonError},
};

use crate::os_codes::without_os_codes;

/// Bound on the lines that are kept, in bytes: a hundred or two.
const BYTES_MAX: usize = 16 << 10;

/// Last lines of a log, up to [`BYTES_MAX`]. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecentLines(Arc<Mutex<VecDeque<u8>>>);

impl RecentLines {
    /// Writer of lines to `output` that keeps them, too.
    pub(crate) fn beside<W: Write>(&self, output: W) -> Tee<W> {
        Tee { output, recent: self.clone() }
    }

    /// The lines. The first may be cut.
    pub(crate) fn text(&self) -> String {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(lines.make_contiguous()).into_owned()
    }

    fn push(&self, bytes: &[u8]) {
        let bytes = bytes.get(bytes.len().saturating_sub(BYTES_MAX)..).unwrap_or_default();
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let excess = (lines.len() + bytes.len()).saturating_sub(BYTES_MAX);
        let excess = excess.min(lines.len());
        lines.drain(..excess);
        lines.extend(bytes);
    }
}

/// Writer of whole lines to an output and to the last lines.
pub(crate) struct Tee<W> {
    output: W,
    recent: RecentLines,
}

impl<W: Write> Write for Tee<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let line = str::from_utf8(bytes).map(without_os_codes).unwrap_or_default();
        self.recent.push(line.as_bytes());
        // A line that cannot be written is not kept a second time.
        self.output.write_all(line.as_bytes()).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept_up_to_a_bound() {
        let (recent, mut output) = (RecentLines::default(), Vec::new());
        for number in 0..10_000 {
            writeln!(recent.beside(&mut output), "line {number}").unwrap();
        }
        let text = recent.text();
        assert_eq!(text.len(), BYTES_MAX);
        assert!(output.ends_with(text.as_bytes()) && text.ends_with("line 9999\n"));
        recent.beside(&mut output).write_all(b"a: No such file (os error 2); b\n").unwrap();
        assert!(output.ends_with(b"a: No such file; b\n") && recent.text().ends_with("a: No such file; b\n"));
        recent.beside(io::sink()).write_all(&[b'x'; BYTES_MAX + 1]).unwrap();
        assert_eq!(recent.text(), "x".repeat(BYTES_MAX));
    }
}
