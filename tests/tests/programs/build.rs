//! Programs from source, built when a test first needs them. Build them before the sandbox is made, which has no route
//! to the module proxy.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use cproxy_tests::build;

/// The static Go program. Go caches its builds, so that only the first one takes long.
pub(crate) fn go() -> Command {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        let mut build = Command::new("go");
        build.current_dir(source("go")).env("CGO_ENABLED", "0");
        build.args(["build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w"]);
        build::program(env!("CARGO_TARGET_TMPDIR"), "go", build)
    });
    Command::new(&*PROGRAM)
}

/// The program that resolves names with musl, a libc other than glibc.
pub(crate) fn musl_resolver() -> Command {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        let mut build = Command::new("musl-gcc");
        build.args(["-static", "-O1", "-Wall", "-Werror"]).arg(source("resolve.c"));
        build::program(env!("CARGO_TARGET_TMPDIR"), "resolve-musl", build)
    });
    Command::new(&*PROGRAM)
}

/// The client in Java, which is compiled when it starts. Names keep the order that the system gives them.
pub(crate) fn java() -> Command {
    let mut java = Command::new("java");
    java.args(["-XX:TieredStopAtLevel=1", "-Djava.net.preferIPv6Addresses=system"]).arg(source("Client.java"));
    java
}

/// The client in JavaScript.
pub(crate) fn node() -> Command {
    let mut node = Command::new("node");
    node.arg(source("client.js"));
    node
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(name)
}
