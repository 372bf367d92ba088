//! The programs as ELF objects, which the agent has in packed form: four fifths of each are types and lines of source
//! that the kernel wants to have, and that pack well.

use zstd_safe::DCtx;

/// Whether this build has the programs. Unit tests do without them where their toolchain is missing (`build.rs`).
pub const HAS_PROGRAMS: bool = cfg!(has_programs);

/// Set of the programs: one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramSet {
    /// Programs that only translate.
    Plain,
    /// Programs that also count by frontend and report calls to `cproxy trace`.
    Tracing,
    /// Programs of network policy, which run behind the others.
    Policy,
    /// Programs for the addresses of load balancers, with that of policy that looks sockets up.
    Receive,
}

impl ProgramSet {
    /// The packed object, built by `build.rs`: its length as four bytes, the lowest first, and a zstd frame. Empty in a
    /// build without programs.
    fn packed(self) -> &'static [u8] {
        #[cfg(not(has_programs))]
        return &[];
        #[cfg(has_programs)]
        match self {
            Self::Plain => include_bytes!(concat!(env!("OUT_DIR"), "/cproxy-programs")),
            Self::Tracing => include_bytes!(concat!(env!("OUT_DIR"), "/cproxy-tracing-programs")),
            Self::Policy => include_bytes!(concat!(env!("OUT_DIR"), "/cproxy-policy-programs")),
            Self::Receive => include_bytes!(concat!(env!("OUT_DIR"), "/cproxy-receive-programs")),
        }
    }

    /// The object; `None` in a build that is broken or has none. It has 120 KB and more, and is in memory only while
    /// programs are loaded.
    pub(super) fn object(self) -> Option<Vec<u8>> {
        // Each set is packed as the difference from the one before.
        let before = match self {
            Self::Plain => Vec::new(),
            Self::Tracing => Self::Plain.object()?,
            Self::Policy => Self::Tracing.object()?,
            Self::Receive => Self::Policy.object()?,
        };
        let (length, packed) = self.packed().split_first_chunk()?;
        let length = u32::from_le_bytes(*length) as usize;
        let mut object = Vec::with_capacity(length);
        let mut decoder = DCtx::try_create()?;
        decoder.ref_prefix(&before).ok()?;
        decoder.decompress(&mut object, packed).ok()?;
        (object.len() == length).then_some(object)
    }
}

#[cfg(test)]
#[cfg(has_programs)]
mod tests {
    use super::*;

    #[test]
    fn each_packed_object_is_a_small_part_of_an_elf_file() {
        for set in [ProgramSet::Plain, ProgramSet::Tracing, ProgramSet::Policy, ProgramSet::Receive] {
            let (object, packed) = (set.object().unwrap(), set.packed());
            assert!(object.starts_with(b"\x7fELF"));
            assert!(packed.len() < object.len() / 4, "{set:?}: {} of {}", packed.len(), object.len());
        }
    }
}
