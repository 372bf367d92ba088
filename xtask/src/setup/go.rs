//! The Go toolchain, which builds the control plane that the cluster tests run against, and one of the programs that
//! are run through ClusterIPs.

use std::{fs, process::Command};

use anyhow::{Context as _, Result, bail};

use crate::{paths, run};

/// Fails unless a Go is there that is new enough for both, which want the same.
pub(crate) fn check() -> Result<()> {
    let wanted = wanted()?;
    let advice = format!(
        "install Go {wanted} or later; tests leave out what needs it with `--without cluster --without programs`"
    );
    let found = match run::capture(Command::new("go").args(["env", "GOVERSION"])) {
        Ok(found) => found.trim().trim_start_matches("go").to_owned(),
        Err(_) => bail!("no Go here, which builds the programs of others: {advice}"),
    };
    if numbers(&found) < numbers(&wanted) {
        bail!("Go {found} is too old for the programs of others: {advice}");
    }
    run::report(format!("go: found {found} (wanted: {wanted})"));
    Ok(())
}

fn wanted() -> Result<String> {
    let file = paths::control_plane_modules().join("control-plane/go.mod");
    let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    let version = text.lines().find_map(|line| line.strip_prefix("go "));
    Ok(version.with_context(|| format!("{} has no `go` line", file.display()))?.trim().to_owned())
}

/// The numbers of a version, for comparing; a suffix such as `rc1` is not told from the release.
fn numbers(version: &str) -> Vec<u32> {
    let parts = version.split('.').map(|part| part.chars().take_while(char::is_ascii_digit).collect::<String>());
    parts.map_while(|digits| digits.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_by_number() {
        assert!(numbers("1.9.7") < numbers("1.26.0"));
        assert!(numbers("1.26.8") > numbers("1.26.0"));
        assert_eq!(numbers("1.27rc1"), [1, 27]);
    }
}
