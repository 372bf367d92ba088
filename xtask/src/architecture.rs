//! Architectures that cproxy is built for.

use std::env::consts;

use anyhow::{Context as _, Result};
use clap::ValueEnum;

/// Architecture of the machines that run a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Architecture {
    /// AMD64, Intel 64
    #[value(name = "x86_64")]
    X86_64,
    /// ARM64: Graviton, Ampere
    Aarch64,
}

impl Architecture {
    /// This machine's.
    pub(crate) fn of_host() -> Result<Self> {
        Self::from_str(consts::ARCH, false)
            .ok()
            .with_context(|| format!("cproxy is built on x86_64 and aarch64, and this machine is {}", consts::ARCH))
    }

    /// Whether this machine runs its programs.
    pub(crate) fn is_of_host(self) -> bool {
        self.name() == consts::ARCH
    }

    /// Its name to Linux.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// Its name to Debian.
    pub(crate) fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    /// The architecture with that name.
    pub(crate) fn of_debian(name: &str) -> Option<Self> {
        Self::value_variants().iter().copied().find(|architecture| architecture.debian() == name)
    }

    /// Its target to Rust.
    pub(crate) fn triple(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    /// Variable of cargo with the linker of its programs.
    pub(crate) fn linker_variable(self) -> String {
        format!("CARGO_TARGET_{}_LINKER", self.triple().to_uppercase().replace('-', "_"))
    }

    /// A tool of the GNU toolchain for its programs.
    pub(crate) fn tool(self, name: &str) -> String {
        if self.is_of_host() { name.to_owned() } else { format!("{}-linux-gnu-{name}", self.name()) }
    }

    /// Whether a file is an ELF program for it.
    pub(crate) fn runs(self, program: &[u8]) -> bool {
        // EM_X86_64 and EM_AARCH64 (elf.h).
        let machine: u16 = match self {
            Self::X86_64 => 62,
            Self::Aarch64 => 183,
        };
        program.starts_with(b"\x7fELF") && program.get(18..20) == Some(&machine.to_le_bytes())
    }

    /// The image of its kernels that boot loaders and hypervisors start.
    pub(crate) fn kernel_image(self) -> &'static str {
        match self {
            Self::X86_64 => "bzImage",
            Self::Aarch64 => "Image",
        }
    }

    /// A cross compiler for it, and Debian's packages of that.
    pub(crate) fn cross_compiler(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::X86_64 => ("x86_64-linux-gnu-gcc", &["gcc-x86-64-linux-gnu", "libc6-dev-amd64-cross"]),
            Self::Aarch64 => ("aarch64-linux-gnu-gcc", &["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"]),
        }
    }

    /// An emulator of its machines, and Debian's package of that.
    pub(crate) fn emulator(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::X86_64 => ("qemu-system-x86_64", &["qemu-system-x86"]),
            Self::Aarch64 => ("qemu-system-aarch64", &["qemu-system-arm"]),
        }
    }

    /// Whether GNU's linker packs its relocations.
    pub(crate) fn packs_relocations(self) -> bool {
        self == Self::X86_64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_of_others_have_a_prefix() {
        let host = Architecture::of_host().unwrap();
        let other = if host == Architecture::X86_64 { Architecture::Aarch64 } else { Architecture::X86_64 };
        assert_eq!(host.tool("strip"), "strip");
        let own = std::fs::read("/proc/self/exe").unwrap();
        assert!(host.runs(&own) && !other.runs(&own) && !host.runs(b"\x7fELF"));
        assert_eq!(other.tool("strip"), format!("{}-linux-gnu-strip", other.name()));
        assert_eq!(Architecture::Aarch64.triple(), "aarch64-unknown-linux-gnu");
    }
}
