//! Files of the configuration, which are read again by a thread that also serves connections.

use std::{fs, io, path::Path};

/// Longest file: a kubeconfig with many clusters.
pub const FILE_BYTES_MAX: u64 = 4 << 20;

/// Checks that a file can be read at once and is not too long. Opening a FIFO would block the thread.
///
/// # Errors
/// It cannot, or there is none.
pub(crate) fn check(path: &Path, longest_bytes: u64) -> io::Result<()> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    if metadata.len() > longest_bytes {
        return Err(io::Error::other(format!("longer than {longest_bytes} bytes")));
    }
    Ok(())
}

/// Content of a file.
///
/// # Errors
/// It is no regular file, longer than this, or cannot be read.
pub fn read(path: &Path, longest_bytes: u64) -> io::Result<Vec<u8>> {
    check(path, longest_bytes)?;
    fs::read(path)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn only_regular_files_of_a_limited_length_are_read() {
        let directory = std::env::temp_dir().join(format!("cproxy-file-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let (file, fifo) = (directory.join("file"), directory.join("fifo"));
        fs::write(&file, "abc").unwrap();
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR, 0).unwrap();
        let error = |path: &Path, longest_bytes| read(path, longest_bytes).unwrap_err().to_string();
        assert_eq!(read(&file, 3).unwrap(), b"abc");
        assert_eq!(error(&file, 2), "longer than 2 bytes");
        for path in [&fifo, &directory, Path::new("/dev/zero")] {
            assert_eq!(error(path, 3), "not a regular file", "{}", path.display());
        }
        assert!(error(&directory.join("none"), 3).contains("No such file"));
        fs::remove_dir_all(directory).unwrap();
    }
}
