//! Builds the eBPF programs of `cproxy-ebpf` for the kernel's instruction set, so that the agent can embed them: the
//! plain set, the tracing set with points of observation, that of network policy, and that of received addresses.
//!
//! The compiler is not this build's own: `core` must be built for a target that no toolchain ships. `cargo xtask setup`
//! finds or installs one and writes down where it is.
//!
//! Most unit tests need no programs. Where nothing is written down, a debug build goes on without programs and without
//! the configuration value `has_programs`, by which the agent's main file refuses to be compiled.

use std::{
    collections::HashMap,
    env,
    fs::{self, File},
    io,
    num::TryFromIntError,
    path::{Path, PathBuf},
    process::{Command, exit},
    time::SystemTime,
};

use object::build::elf::{Builder, SectionData};
use zstd_safe::{CCtx, CParameter};

const PROGRAMS: &str = "cproxy-programs";
const POLICY_PROGRAMS: &str = "cproxy-policy-programs";
const RECEIVE_PROGRAMS: &str = "cproxy-receive-programs";
/// Binary and feature of each set, and its name here.
const SETS: [(&str, &str, &str); 4] = [
    (PROGRAMS, "programs", PROGRAMS),
    (PROGRAMS, "trace", "cproxy-tracing-programs"),
    (POLICY_PROGRAMS, "programs", POLICY_PROGRAMS),
    (RECEIVE_PROGRAMS, "programs", RECEIVE_PROGRAMS),
];
/// Highest level of zstd.
const LEVEL: i32 = 22;
/// Distance of repetitions, as a power of two: two sets are within it.
const WINDOW_LOG: u32 = 19;
const TARGET: &str = "bpfel-unknown-none";
/// Variable without which a debug build goes on without programs. `cargo xtask` sets it where it compiles ahead of the
/// toolchain: everything above this crate would be compiled twice.
const REQUIRED: &str = "CPROXY_PROGRAMS_REQUIRED";

/// Failure to build and embed the programs.
#[derive(Debug, thiserror::Error)]
enum BuildError {
    #[error("cargo did not set {0}")]
    NoVariable(&'static str),
    #[error("the crate is not in its workspace")]
    NoWorkspace,
    #[error("the eBPF programs need a toolchain of their own: run `cargo xtask setup` once")]
    NoToolchain,
    #[error("cannot run {0}: {1}")]
    Run(String, io::Error),
    #[error("the eBPF programs do not build; if the toolchain has changed, run `cargo xtask setup`")]
    Programs,
    #[error("packing {0}: {1}")]
    Pack(&'static str, PackError),
    #[error("{path}: {1}", path = .0.display())]
    File(PathBuf, io::Error),
    #[error("{path}: {1}", path = .0.display())]
    Object(PathBuf, object::build::Error),
}

/// Failure to pack a set.
#[derive(Debug, thiserror::Error)]
enum PackError {
    #[error(transparent)]
    Length(#[from] TryFromIntError),
    #[error("{}", zstd_safe::get_error_name(*.0))]
    Zstd(zstd_safe::ErrorCode),
}

fn main() {
    if let Err(error) = run() {
        println!("cargo::error={error}");
        exit(1);
    }
}

fn run() -> Result<(), BuildError> {
    let out_dir = PathBuf::from(variable("OUT_DIR")?);
    let manifest_dir = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let workspace = manifest_dir.ancestors().nth(2).ok_or(BuildError::NoWorkspace)?;
    for path in ["cproxy-ebpf/src", "cproxy-ebpf/Cargo.toml", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={}", workspace.join(path).display());
    }
    println!("cargo::rustc-check-cfg=cfg(has_programs)");
    let Some(toolchain) = Toolchain::read()? else {
        println!("cargo::rerun-if-env-changed={REQUIRED}");
        if variable("PROFILE")? == "release" || env::var_os(REQUIRED).is_some() {
            return Err(BuildError::NoToolchain);
        }
        println!(
            "cargo::warning=built without the eBPF programs and without the tests of them; {}",
            BuildError::NoToolchain
        );
        return wait_for_setup(workspace);
    };
    println!("cargo::rustc-cfg=has_programs");
    // Each set is packed as the difference from the one before it.
    let mut before = Vec::new();
    for (binary, feature, name) in SETS {
        let programs = build_set(&toolchain, workspace, binary, feature)?;
        let output = out_dir.join(name);
        let packed = packed(&programs, &before).map_err(|error| BuildError::Pack(name, error))?;
        fs::write(&output, packed).map_err(|error| BuildError::File(output, error))?;
        before = programs;
    }
    Ok(())
}

/// Lets the build run again once there is a toolchain. Cargo takes a missing file as changed each time and so cannot
/// watch for the one that setup writes; it watches a file that setup removes.
fn wait_for_setup(workspace: &Path) -> Result<(), BuildError> {
    let file = workspace.join("target/ebpf/without-toolchain");
    println!("cargo::rerun-if-changed={}", file.display());
    // Older than this build, or cargo would think it changed meanwhile.
    let made = fs::create_dir_all(workspace.join("target/ebpf")).and_then(|()| File::create(&file));
    let aged = made.and_then(|made| made.set_modified(SystemTime::UNIX_EPOCH));
    match aged.map_err(|error| error.kind()) {
        // In a checkout of another user, the build runs each time.
        Ok(()) | Err(io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) => Ok(()),
        Err(kind) => Err(BuildError::File(file, kind.into())),
    }
}

/// Builds a set, and returns its object.
fn build_set(toolchain: &Toolchain, workspace: &Path, binary: &str, feature: &str) -> Result<Vec<u8>, BuildError> {
    // Shared by all profiles of the agent: the programs are the same for each.
    let target_dir = workspace.join("target/ebpf");
    toolchain.build(workspace, &target_dir, binary, feature)?;
    let built = target_dir.join(TARGET).join("release").join(binary);
    let programs = fs::read(&built).map_err(|error| BuildError::File(built.clone(), error))?;
    without_debug_sections(&programs).map_err(|error| BuildError::Object(built, error))
}

/// The programs as the agent embeds them: their length as four bytes, the lowest first, and a zstd frame (RFC 8878) for
/// whose decoder `before` is the content that came before.
fn packed(programs: &[u8], before: &[u8]) -> Result<Vec<u8>, PackError> {
    let length = u32::try_from(programs.len())?;
    let mut encoder = CCtx::create();
    for parameter in [CParameter::CompressionLevel(LEVEL), CParameter::WindowLog(WINDOW_LOG)] {
        encoder.set_parameter(parameter).map_err(PackError::Zstd)?;
    }
    encoder.ref_prefix(before).map_err(PackError::Zstd)?;
    let mut frame = Vec::with_capacity(zstd_safe::compress_bound(programs.len()));
    encoder.compress2(&mut frame, programs).map_err(PackError::Zstd)?;
    Ok([&length.to_le_bytes(), frame.as_slice()].concat())
}

/// The linker makes BTF from the compiler's debug information, which then is three quarters of the file and of no more
/// use.
fn without_debug_sections(programs: &[u8]) -> object::build::Result<Vec<u8>> {
    let mut builder = Builder::read(programs)?;
    for section in &mut builder.sections {
        let name = String::from_utf8_lossy(&section.name).into_owned();
        section.delete = name.starts_with(".debug") || name.starts_with(".rel.debug");
    }
    builder.delete_orphans();
    // LLVM keeps the names of sections among those of symbols; the writer wants a table for each.
    let names = builder.sections.add();
    names.name = b".shstrtab"[..].into();
    names.sh_type = object::elf::SHT_STRTAB;
    names.data = SectionData::SectionString;
    let mut slim = Vec::new();
    builder.write(&mut slim)?;
    Ok(slim)
}

/// Compiler and linker that `cargo xtask setup` has found.
struct Toolchain {
    cargo: String,
    rustc: String,
    linker: String,
    is_stable: bool,
}

impl Toolchain {
    /// `None` where no setup has written one down.
    fn read() -> Result<Option<Self>, BuildError> {
        for name in CACHE_VARIABLES {
            println!("cargo::rerun-if-env-changed={name}");
        }
        let Some(path) = cache_dir().map(|cache| cache.join("ebpf-toolchain")) else { return Ok(None) };
        let Ok(text) = fs::read_to_string(&path) else { return Ok(None) };
        println!("cargo::rerun-if-changed={}", path.display());
        let values: HashMap<_, _> = text.lines().filter_map(|line| line.split_once('=')).collect();
        let value = |key: &str| values.get(key).map(|value| (*value).to_owned()).ok_or(BuildError::NoToolchain);
        let found = Self {
            cargo: value("cargo")?,
            rustc: value("rustc")?,
            linker: value("linker")?,
            is_stable: value("bootstrap")? == "1",
        };
        let all_exist = [&found.cargo, &found.rustc, &found.linker].iter().all(|path| Path::new(path).exists());
        if all_exist { Ok(Some(found)) } else { Err(BuildError::NoToolchain) }
    }

    fn build(&self, workspace: &Path, target_dir: &Path, binary: &str, feature: &str) -> Result<(), BuildError> {
        let mut command = Command::new(&self.cargo);
        command.current_dir(workspace).args(["build", "--release", "--package", "cproxy-ebpf", "--bin", binary]);
        command.args(["--features", feature, "--target", TARGET, "-Z", "build-std=core", "--target-dir"]);
        command.arg(target_dir);
        // The verifier reads every instruction: speed and simplicity count here, not the size of a binary.
        for setting in ["opt-level=3", "debug=2", "strip=\"none\"", "lto=\"thin\""] {
            command.args(["--config", &format!("profile.release.{setting}")]);
        }
        // The outer build's settings are for another compiler and another target.
        for (name, _) in env::vars_os() {
            let name = name.to_string_lossy();
            let is_outer = name.starts_with("CARGO") || name.starts_with("RUSTUP_TOOLCHAIN") || name == "RUSTFLAGS";
            if is_outer && name != "CARGO_HOME" {
                command.env_remove(&*name);
            }
        }
        for name in ["RUSTC_WORKSPACE_WRAPPER", "RUSTC_WRAPPER", "RUSTDOC"] {
            command.env_remove(name);
        }
        command.env("RUSTC", &self.rustc).env("CARGO_ENCODED_RUSTFLAGS", self.rustflags(workspace)?);
        if self.is_stable {
            command.env("RUSTC_BOOTSTRAP", "1");
        }
        let output = command.output().map_err(|error| BuildError::Run(self.cargo.clone(), error))?;
        if output.status.success() {
            return Ok(());
        }
        for line in String::from_utf8_lossy(&output.stderr).lines() {
            println!("cargo::warning={line}");
        }
        Err(BuildError::Programs)
    }

    /// Directory of the compiler, with the sources of `core`.
    fn sysroot(&self) -> Result<String, BuildError> {
        let output = Command::new(&self.rustc).args(["--print", "sysroot"]).output();
        let output = output.map_err(|error| BuildError::Run(self.rustc.clone(), error))?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Directory of cargo with the sources of dependencies.
    fn sources() -> PathBuf {
        let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = variable("CARGO_HOME").or_else(|| variable("HOME").map(|home| home.join(".cargo")));
        home.unwrap_or_default().join("registry/src")
    }

    /// The kernel's type information of the programs names their sources: by names that are the same on each machine.
    fn rustflags(&self, workspace: &Path) -> Result<String, BuildError> {
        let architecture = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_else(|_| "x86_64".to_owned());
        let flags = [
            &format!("--cfg=bpf_target_arch=\"{architecture}\""),
            &"-Cdebuginfo=2".to_owned(),
            &"-Clink-arg=--btf".to_owned(),
            &format!("-Clinker={}", self.linker),
            &format!("--remap-path-prefix={}=/usr/src/cproxy", workspace.display()),
            &format!("--remap-path-prefix={}=", Self::sources().display()),
            &format!("--remap-path-prefix={}=/usr/src/rust", self.sysroot()?),
        ];
        Ok(flags.map(String::as_str).join("\u{1f}"))
    }
}

/// Variables that move [`cache_dir`].
const CACHE_VARIABLES: [&str; 3] = ["CPROXY_CACHE_DIR", "XDG_CACHE_HOME", "HOME"];

/// Directory of `cargo xtask` for results that outlive a checkout, as xtask/src/paths.rs has it.
fn cache_dir() -> Option<PathBuf> {
    let [ours, xdg, home] =
        CACHE_VARIABLES.map(|name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from));
    ours.or_else(|| xdg.map(|dir| dir.join("cproxy"))).or_else(|| home.map(|dir| dir.join(".cache/cproxy")))
}

fn variable(name: &'static str) -> Result<String, BuildError> {
    env::var(name).map_err(|_| BuildError::NoVariable(name))
}
