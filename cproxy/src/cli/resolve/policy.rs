//! `cproxy resolve --policy`

use std::process::ExitCode;

use clap::Args;
use cproxy_core::{Address, FrontendSource, ServiceName, Store, sorted_set};

use crate::{
    cli::{
        exit_codes::NOT_ANSWERED,
        options::Format,
        output::{print, print_error},
    },
    diagnose::policy::{Destination, Judgement, Side, judge},
    manifests::{Files, ManifestError},
    report::pretty_json,
};

/// Flags of `cproxy resolve --policy`.
#[derive(Args, Debug)]
pub(super) struct PolicyOptions {
    /// Say whether network policies allow traffic, and which rule says so. Exit code: 0 allowed, 1 denied, 4 that
    /// cannot be said
    #[arg(long, requires_all = ["from", "to"], conflicts_with = "explain")]
    pub(super) policy: bool,
    /// Side that calls: NAMESPACE/POD or an address
    #[arg(long, value_name = "POD", requires = "policy")]
    from: Option<Side>,
    /// Side that is called: NAMESPACE/POD:PORT[/PROTOCOL] or ADDRESS:PORT[/PROTOCOL]; PORT is a number or a name
    #[arg(long, value_name = "POD:PORT", requires = "policy")]
    to: Option<Destination>,
}

impl PolicyOptions {
    /// The question that is asked.
    pub(super) fn question(&self) -> Option<(&Side, &Destination)> {
        self.from.as_ref().zip(self.to.as_ref()).filter(|_| self.policy)
    }
}

/// Answers a question from files, whose objects the `store` does not have. Exit codes: 0 allowed, 1 denied, 4 if that
/// cannot be said.
pub(super) fn run(
    (from, to): (&Side, &Destination),
    files: Result<Files, ManifestError>,
    store: Store,
    output: Format,
) -> anyhow::Result<ExitCode> {
    let not_answered = |error: &dyn std::fmt::Display| {
        print_error(error);
        Ok(ExitCode::from(NOT_ANSWERED))
    };
    let files = match files {
        Ok(files) => files,
        Err(error) => return not_answered(&error),
    };
    let judge = || judge(&files.policy_objects(), from, to);
    let mut judged = refuse_services(&files, store, from, &to.side).and_then(|()| judge());
    if let Ok(Judgement { answer, unread, .. }) = &mut judged {
        let file = files.has_unread_file().then(|| "a file that cannot be read".to_owned());
        let doubt = |what: &String| format!("{what} is not used, and might change the answer");
        answer.notes.extend(unread.iter().chain(&file).map(doubt));
    }
    let duplicates = files.duplicates();
    let of_policies = judged.iter().flat_map(|judgement| &judgement.problems);
    let problems = sorted_set(files.problems().chain(&duplicates).chain(of_policies));
    problems.iter().for_each(|problem| print_error(problem));
    let (answer, unread) = match &judged {
        Ok(judgement) => (&judgement.answer, &judgement.unread),
        Err(error) => return not_answered(error),
    };
    match output {
        Format::Table => print(&answer.text())?,
        Format::Json => print(&format!("{}\n", pretty_json(answer)?))?,
    }
    if files.has_unread_file() {
        return not_answered(&"some manifests could not be read; the answer is that of the others");
    }
    if !unread.is_empty() {
        let names = unread.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        return not_answered(&format!("not used, as said above: {names}; the answer is that of the other objects"));
    }
    Ok(if answer.is_allowed() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Refuses Services in the place of pods: policies are about the addresses that calls to them are translated to.
fn refuse_services(files: &Files, store: Store, from: &Side, to: &Side) -> Result<(), String> {
    let objects = files.policy_objects();
    let named = |side: &Side| match side {
        Side::Pod(name) => Some(name.clone()).filter(|name| !objects.has_pod(name) && files.has_service(name)),
        Side::Address(_) => None,
    };
    let at_address = || match to {
        Side::Pod(_) => None,
        Side::Address(address) => service_at(files, store, *address),
    };
    let service = named(from).map(|service| ("--from", from, service));
    let Some((flag, side, service)) = service.or_else(|| Some(("--to", to, named(to).or_else(at_address)?))) else {
        return Ok(());
    };
    let about = "policies are about the pods behind it: name one of them, and its own port";
    Err(format!("{flag} {side}: this is Service {service}, and {about}"))
}

/// Service that has an address, other than that of a node.
fn service_at(files: &Files, mut store: Store, address: Address) -> Option<ServiceName> {
    files.events().for_each(|event| drop(store.apply(event)));
    let rows = cproxy_core::resolve(&store).into_iter();
    let mut of_services = rows.filter(|row| row.source != FrontendSource::NodePort);
    of_services.find(|row| row.frontend.address == address).map(|row| row.service)
}
