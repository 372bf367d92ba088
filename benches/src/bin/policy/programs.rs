//! The programs that are attached for a pod: whether they are the same without a policy, and the time of a policy's.

use anyhow::{Context as _, Result};
use cproxy_benches::{
    bpf::{Link, ProgramInfo, enable_statistics, links},
    pod::Pod,
    report::Table,
};
use cproxy_ebpf::{LAYOUT_VERSION, policy::POLICY_LAYOUT_VERSION};
use cproxy_tests::sandbox::Sandbox;

use crate::{
    calls,
    engine::{Engine, Subject},
    place::{Servers, Stand},
};

/// Turns while the kernel times programs.
const TURNS: u32 = 20;

/// Name of the directory of a policy's pins.
pub(crate) fn policy_directory() -> String {
    format!("policy-v{POLICY_LAYOUT_VERSION}")
}

/// Links of the programs that translate, and of a policy's.
fn all_links(pod: &Pod) -> Result<[Vec<(String, Link)>; 2]> {
    let directory = |name: String| links(&pod.pin_dir.join(name));
    Ok([directory(format!("v{LAYOUT_VERSION}"))?, directory(policy_directory())?])
}

/// Whether the pod that no policy selects has the programs of the one without `--policy`, as a table and a verdict.
pub(crate) fn comparison(stands: &[Stand]) -> Result<(Table, bool)> {
    let find = |engine| stands.iter().find(|stand| stand.subject.engine == engine).context("it is measured");
    let of = |engine| -> Result<_> {
        let [plain, policy] = all_links(&find(engine)?.pod)?;
        let tag = |(name, link): (String, Link)| Ok((name, link.program_tag().context("asking for a tag")?));
        Ok([plain, policy].map(|links| links.into_iter().map(tag).collect::<Result<Vec<_>>>()))
    };
    let [[without, none], [with, policy]] = [of(Engine::Nobody)?, of(Engine::CproxyNotIsolated)?];
    let (without, with, policy) = (without?, with?, [none?, policy?].concat());
    let is_same = !with.is_empty() && with == without && policy.is_empty();
    let tag = |tags: &[(String, String)], name: &str| {
        tags.iter().find(|(other, _)| other == name).map_or_else(|| "-".to_owned(), |(_, tag)| tag.clone())
    };
    let mut names: Vec<_> = [&*without, &*with, &*policy].concat().into_iter().map(|(name, _)| name).collect();
    names.sort_unstable();
    names.dedup();
    let row = |name: String| {
        let cells = [&without, &with].map(|tags| tag(tags, &name)).into();
        (name, cells)
    };
    let word = if is_same { "the same" } else { "others" };
    let table = Table {
        title: format!("Tags of the attached programs, which are {word}"),
        columns: ["without --policy", "--policy enforce, not isolated"].map(str::to_owned).into(),
        rows: names.into_iter().map(row).collect(),
    };
    Ok((table, is_same))
}

/// Runs of each of a policy's programs in some turns, as the kernel times them.
pub(crate) fn runs(sandbox: &Sandbox, stands: &[Stand], outside: &Servers) -> Result<Table> {
    let isolated = stands.iter().filter(|stand| {
        let Subject { engine, .. } = stand.subject;
        engine.is_of_cproxy() && engine.isolates()
    });
    let _statistics = enable_statistics().context("switching BPF statistics on")?;
    let mut table = Table {
        title: "Runs of the policy's programs: ns each, as the kernel times them, and instructions verified".to_owned(),
        ..Table::default()
    };
    for stand in isolated {
        let [_, links] = all_links(&stand.pod)?;
        let programs = links.into_iter().map(|(name, link)| Ok((name, link.program().context("a program")?)));
        let programs = programs.collect::<Result<Vec<_>>>()?;
        let infos = || programs.iter().map(|(_, program)| program.info()).collect::<std::io::Result<Vec<_>>>();
        let before = infos().context("asking for a program's statistics")?;
        (0..TURNS).try_for_each(|_| calls::all(sandbox, stand, outside).map(drop))?;
        let after = infos().context("asking for a program's statistics")?;
        table.columns.push(stand.subject.to_string());
        for (((name, _), before), after) in programs.iter().zip(before).zip(after) {
            let cell = cell(before, after);
            match table.rows.iter_mut().find(|(other, _)| other == name) {
                Some((_, cells)) => cells.push(cell),
                None => table.rows.push((name.clone(), vec![cell])),
            }
        }
    }
    Ok(table)
}

fn cell(before: ProgramInfo, after: ProgramInfo) -> String {
    let (runs, time_ns) = (after.runs - before.runs, after.run_time_ns - before.run_time_ns);
    let time = if runs == 0 { "no runs".to_owned() } else { format!("{:.0}", time_ns as f64 / runs as f64) };
    format!("{time}, {}", after.verified_instructions)
}
