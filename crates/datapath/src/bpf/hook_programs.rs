//! Programs at our hooks, ours and those of others, in our cgroup and in those below it.
//!
//! Ours is in the effective list of every cgroup below, because a link is attached with BPF_F_ALLOW_MULTI, which a
//! cgroup below cannot undo (kernel/bpf/cgroup.c, `compute_effective_progs`). Programs of cgroups below run first.

use std::{
    collections::VecDeque,
    fmt, fs, io,
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use aya_obj::generated::bpf_attach_type as AttachType;

use super::{
    cgroups::cgroup_id,
    pins::PinDir,
    policy::PolicyPins,
    program::Program,
    receive::ReceivePins,
    syscalls::{effective_programs, link_cgroup, obj_get, program_name},
    takeover::kept_programs,
};

/// Hooks, in the order of [`Program::ALL`].
const HOOKS: [AttachType; Program::ALL.len()] = [
    AttachType::BPF_CGROUP_INET4_CONNECT,
    AttachType::BPF_CGROUP_INET6_CONNECT,
    AttachType::BPF_CGROUP_UDP4_SENDMSG,
    AttachType::BPF_CGROUP_UDP6_SENDMSG,
    AttachType::BPF_CGROUP_UDP4_RECVMSG,
    AttachType::BPF_CGROUP_UDP6_RECVMSG,
    AttachType::BPF_CGROUP_INET4_GETPEERNAME,
    AttachType::BPF_CGROUP_INET6_GETPEERNAME,
    AttachType::BPF_CGROUP_INET_SOCK_RELEASE,
];

/// Number of cgroups that are looked at in a whole tree.
pub const CGROUPS_MAX: usize = 1_000;

/// Programs at our hooks in a tree of cgroups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HookPrograms {
    /// Programs that are not ours.
    pub others: Vec<OtherProgram>,
    /// First cgroup in which a program of ours does not run although its links are attached above.
    pub without_ours: Option<PathBuf>,
    /// Number of cgroups that were looked at.
    pub cgroups: usize,
    /// There may be more.
    pub is_cut: bool,
}

/// Program of others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherProgram {
    /// The kernel's id.
    pub id: u32,
    /// Its name, if it has one and may be opened.
    pub name: Option<String>,
    /// Our links beside which it runs.
    pub links: Vec<&'static str>,
    /// Highest cgroup in which it was found.
    pub cgroup: PathBuf,
}

impl fmt::Display for OtherProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "program {}", self.id)?;
        if let Some(name) = &self.name {
            write!(f, " ({name})")?;
        }
        write!(f, " at {}", self.links.join(", "))
    }
}

/// Looks at `cgroup` and those below it, the higher ones first, `most` of them. The ids of our programs come from the
/// links below `pins`, if they are installed. A verdict of the others counts as well: one that denies a call denies it
/// for all.
#[must_use]
pub fn hook_programs(pins: &PinDir, cgroup: &Path, most: usize) -> HookPrograms {
    let ours = Program::ALL.map(|program| {
        let link = obj_get(&pins.object(program.link), 0).and_then(|link| link_cgroup(link.as_fd()));
        link.ok().filter(|link| link.cgroup_id != 0)
    });
    let mut known = kept_programs(pins);
    known.extend(linked_programs(pins));
    let id = cgroup_id(cgroup).unwrap_or_default();
    let mut found = HookPrograms::default();
    let mut waiting = VecDeque::from([cgroup.to_owned()]);
    while let Some(dir) = waiting.pop_front() {
        // A cgroup may have gone meanwhile.
        let Ok(opened) = fs::File::open(&dir) else { continue };
        found.cgroups += 1;
        for ((program, hook), own) in Program::ALL.into_iter().zip(HOOKS).zip(ours) {
            let Ok(ids) = effective_programs(opened.as_fd(), hook as u32) else { continue };
            // They may be attached to another cgroup.
            let expected = own.filter(|own| own.cgroup_id == id);
            if expected.is_some_and(|own| !ids.contains(&own.program_id)) {
                found.without_ours.get_or_insert_with(|| dir.clone());
            }
            let is_ours = |id: &u32| own.is_some_and(|own| own.program_id == *id) || known.contains(id);
            ids.iter().filter(|id| !is_ours(id)).for_each(|id| found.record(*id, program.link, &dir));
        }
        if found.cgroups == most {
            found.is_cut = true;
            break;
        }
        let entries = fs::read_dir(&dir).into_iter().flatten().flatten();
        waiting.extend(entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|dir| dir.path()));
    }
    for other in &mut found.others {
        other.name = program_name(other.id);
    }
    found
}

/// Programs of a policy, and of received addresses, at the hooks that translate, too.
fn linked_programs(pins: &PinDir) -> impl Iterator<Item = u32> {
    let directories = [PolicyPins::new(pins).directory().to_owned(), ReceivePins::new(pins).directory().to_owned()];
    let links = directories.into_iter().flat_map(|dir| Program::ALL.map(|program| dir.join(program.link)));
    links.filter_map(|link| Some(link_cgroup(obj_get(&link, 0).ok()?.as_fd()).ok()?.program_id))
}

/// Links of ours whose programs do not run for processes in `cgroup`: they are attached elsewhere, or detached.
///
/// # Errors
/// The cgroup cannot be opened.
pub fn missing_programs(pins: &PinDir, cgroup: &Path) -> io::Result<Vec<&'static str>> {
    let dir = fs::File::open(cgroup)?;
    let runs = |program: Program, hook: AttachType| {
        let link = obj_get(&pins.object(program.link), 0).and_then(|link| link_cgroup(link.as_fd()))?;
        Ok::<_, io::Error>(effective_programs(dir.as_fd(), hook as u32)?.contains(&link.program_id))
    };
    let missing = |(program, hook): &(Program, AttachType)| !runs(*program, *hook).unwrap_or(false);
    Ok(Program::ALL.into_iter().zip(HOOKS).filter(missing).map(|(program, _)| program.link).collect())
}

impl HookPrograms {
    fn record(&mut self, id: u32, link: &'static str, dir: &Path) {
        match self.others.iter_mut().find(|other| other.id == id) {
            Some(other) if other.links.contains(&link) => {}
            Some(other) => other.links.push(link),
            None => self.others.push(OtherProgram { id, name: None, links: vec![link], cgroup: dir.to_owned() }),
        }
    }
}
