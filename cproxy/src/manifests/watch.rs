//! Follows manifest files: inotify on their directories, so that replacing a file by renaming is seen too. Where
//! inotify does not report all changes, the files are polled besides; without inotify, all are.

use std::{
    collections::{BTreeSet, HashMap},
    ffi::OsStr,
    io,
    mem::MaybeUninit,
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStrExt, fs::MetadataExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use cproxy_core::{Event, Problem, sorted_set};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use tokio::{io::unix::AsyncFd, sync::mpsc};

use super::{
    files::{Change, Files, nearest},
    poller::{POLL_PAUSE, Poller},
};
use crate::problem_log::ProblemLog;

/// Several files are often written together: their changes become one.
const FILES_QUIET: Duration = Duration::from_millis(10);
/// No stream of changes delays the first for longer than this.
const FILES_DELAY_MAX: Duration = Duration::from_millis(100);
/// Maximum number of events in one message.
const EVENTS_AT_ONCE: usize = 128;

/// Watches the directories of some paths.
#[derive(Debug)]
pub struct Watcher {
    /// `None`: all paths are polled.
    inotify: Option<AsyncFd<OwnedFd>>,
    paths: Vec<PathBuf>,
    directories: HashMap<i32, PathBuf>,
    /// Polling of paths that other machines can change, or of all.
    poller: Option<Poller>,
}

/// A file that is created is not written yet; see [`is_complete_at_once`].
const EVENTS: WatchFlags = WatchFlags::CLOSE_WRITE
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF);

impl Watcher {
    /// Starts watching; changes from now on are seen by [`watch`]. Call it inside a tokio runtime.
    #[must_use]
    pub fn new(paths: &[PathBuf]) -> Self {
        let mut watcher = Self { inotify: None, paths: paths.to_vec(), directories: HashMap::new(), poller: None };
        match open() {
            Ok(inotify) => {
                watcher.inotify = Some(inotify);
                watcher.add_watches_or_poll();
            }
            Err(error) => watcher.poll_all(&error),
        }
        watcher
    }

    fn add_watches_or_poll(&mut self) {
        if let Err(error) = self.add_watches() {
            self.poll_all(&error);
        }
    }

    /// Goes on without inotify.
    fn poll_all(&mut self, error: &io::Error) {
        let cause = match error.raw_os_error() {
            Some(libc::EMFILE) => " (fs.inotify.max_user_instances is used up by this user's programs: raise it)",
            Some(libc::ENOSPC) => " (fs.inotify.max_user_watches is used up by this user's programs: raise it)",
            _ => "",
        };
        tracing::warn!(
            name: "manifests_polled",
            "inotify: {error}{cause}; manifests are polled every {POLL_PAUSE:?} until the agent starts again"
        );
        self.inotify = None;
        self.directories.clear();
        self.poller = Some(Poller::new(self.paths.clone()));
    }

    /// Watches the directory of each path or, while that does not exist, the nearest one above it, which sees its
    /// return. Watching a directory again has no effect.
    fn add_watches(&mut self) -> io::Result<()> {
        let Some(inotify) = &self.inotify else { return Ok(()) };
        for path in &self.paths {
            let dir = directory(path);
            let watch = inotify::add_watch(inotify.get_ref(), dir, EVENTS)?;
            self.directories.insert(watch, dir.to_owned());
        }
        self.poller = Poller::for_shared(&self.paths);
        Ok(())
    }

    /// Waits until files have changed and then been quiet.
    async fn changed(&mut self) -> Change {
        match self.try_changed().await {
            Ok(change) => change,
            Err(error) => {
                self.poll_all(&error);
                Change::Everything
            }
        }
    }

    async fn try_changed(&mut self) -> io::Result<Change> {
        let mut change = Change::Paths(BTreeSet::new());
        loop {
            tokio::select! {
                result = self.read(&mut change) => break result?,
                () = next_poll(self.poller.as_ref()) => {}
            }
            let changed = self.poller.as_mut().map(Poller::poll).unwrap_or_default();
            if !changed.is_empty() {
                return Ok(Change::Paths(changed));
            }
        }
        let deadline = tokio::time::Instant::now() + FILES_DELAY_MAX;
        loop {
            let quiet = (tokio::time::Instant::now() + FILES_QUIET).min(deadline);
            match tokio::time::timeout_at(quiet, self.read(&mut change)).await {
                Ok(result) => result?,
                Err(_) => break,
            }
        }
        // This precedes the reading of the files, so that later changes are seen.
        if change == Change::Everything {
            self.add_watches_or_poll();
        }
        Ok(change)
    }

    /// Waits for at least one event and reads all pending ones.
    async fn read(&self, change: &mut Change) -> io::Result<()> {
        let mut has_read = false;
        let Some(inotify) = &self.inotify else { return std::future::pending().await };
        loop {
            let mut ready = inotify.readable().await?;
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut reader = Reader::new(ready.get_inner(), &mut buffer);
            loop {
                match reader.next() {
                    Ok(event) => self.record(&event, change),
                    Err(rustix::io::Errno::WOULDBLOCK) => break,
                    Err(error) => return Err(error.into()),
                }
                has_read = true;
            }
            ready.clear_ready();
            if has_read {
                return Ok(());
            }
        }
    }

    fn record(&self, event: &inotify::Event<'_>, change: &mut Change) {
        let Change::Paths(paths) = change else { return };
        let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()));
        let path = self.directories.get(&event.wd()).and_then(|dir| Some(dir.join(name?)));
        // A mounted ConfigMap is one directory of links through `..data`, which is replaced as a whole.
        let is_config_map = name.is_some_and(|name| name.as_bytes().starts_with(b".."));
        let is_above = |path: &PathBuf| path.is_dir() && self.paths.iter().any(|ours| ours.starts_with(path));
        match path {
            Some(path) if !is_config_map && !is_above(&path) => {
                if !event.events().contains(ReadFlags::CREATE) || is_complete_at_once(&path) {
                    paths.insert(path);
                }
            }
            // The queue has overflowed, or a directory itself has come, gone or moved.
            _ => *change = Change::Everything,
        }
    }
}

/// Waits until the next poll, if there is anything to poll; otherwise nothing wakes the idle agent.
async fn next_poll(poller: Option<&Poller>) {
    match poller {
        Some(poller) => poller.next_poll().await,
        None => std::future::pending().await,
    }
}

/// Whether a created entry is complete: a file reports the end of its writing later, a link, a FIFO or a directory
/// reports nothing more.
fn is_complete_at_once(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|metadata| !metadata.is_file() || metadata.nlink() > 1)
}

fn open() -> io::Result<AsyncFd<OwnedFd>> {
    let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    // SAFETY: an OwnedFd is the same open descriptor for as long as it lives, and no other owner closes it.
    Ok(unsafe { AsyncFd::register(inotify) }?)
}

fn directory(path: &Path) -> &Path {
    nearest(path, Path::is_dir)
}

/// Sends the files' content now and after every change, and has others `look` at it; ends when the receiver is closed.
pub async fn watch(
    mut files: Files,
    mut watcher: Watcher,
    events: mpsc::Sender<Vec<Event>>,
    look: impl Fn(&Files) + Send,
) {
    let (mut problem_log, mut unread_log) = (ProblemLog::default(), ProblemLog::default());
    loop {
        look(&files);
        let changes = problem_log.exchange(files.problems().cloned().chain(files.duplicates()));
        for problem in &changes.new {
            tracing::warn!(name: "problem", "{problem}");
        }
        let still = sorted_set(files.unread().map(|problem| problem.object.clone()));
        for Problem { object, .. } in unread_log.exchange(files.unread().cloned()).ended {
            if !still.contains(&object) && Path::new(&object).exists() {
                tracing::info!(name: "problem_ended", "{object}: can be read again");
            }
        }
        let has_changed = !changes.new.is_empty() || !changes.ended.is_empty();
        if has_changed && events.send(vec![files.problem_event()]).await.is_err() {
            return;
        }
        if send(&files, &events).await.is_err() {
            return;
        }
        let change = watcher.changed().await;
        files.refresh(&change);
    }
}

/// Sends the files' content in small portions: all of it at once would be in memory twice.
async fn send(files: &Files, events: &mpsc::Sender<Vec<Event>>) -> Result<(), mpsc::error::SendError<Vec<Event>>> {
    let mut all = files.events();
    loop {
        let batch: Vec<_> = all.by_ref().take(EVENTS_AT_ONCE).collect();
        if batch.is_empty() {
            return Ok(());
        }
        events.send(batch).await?;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_path_that_is_too_long_costs_no_time() {
        let start = Instant::now();
        assert_eq!(directory(Path::new(&"/a".repeat(150_000))), Path::new("/"));
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    }
}
