//! The kernel's own BTF, which our programs need nothing of, and which aya reads all the same (`EbpfLoader::new`): 17
//! MB of memory and most of the time that installing takes.

use aya::EbpfLoader;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// New loader that has not read it: meanwhile this process may open no file. Where that limit cannot be set, it takes
/// longer. Call it while no other thread opens files.
pub(super) fn loader_without_it() -> EbpfLoader<'static> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).ok();
    let loader = EbpfLoader::new();
    // A process may always set the limit that it had.
    setrlimit(Resource::Nofile, limit).ok();
    loader
}
