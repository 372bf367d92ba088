//! Schemas of the output in JSON, for the manual. The agent does not have them.

use schemars::{Schema, schema_for};

use crate::{
    config::SettingRow,
    diagnose::{
        check::Requirement,
        explain::{Answer, ReceiveAnswer},
        status::StatusRow,
    },
    report::{
        BackendRow, DenialRow, Explained, FrontendRow, PodPolicyReport, PolicyAnswer, ProblemRow, ReceivedRow,
        SocketRow, SummaryRow, TraceRow,
    },
};

/// Commands with their output.
#[must_use]
pub fn schemas() -> [(&'static str, Schema); 18] {
    [
        ("cproxy get services -o json", schema_for!(Vec<FrontendRow>)),
        ("cproxy get backends -o json", schema_for!(Vec<BackendRow>)),
        ("cproxy get sockets -o json", schema_for!(Vec<SocketRow>)),
        ("cproxy get config -o json", schema_for!(Vec<SettingRow>)),
        ("cproxy get problems -o json", schema_for!(Vec<ProblemRow>)),
        ("cproxy get policy -o json", schema_for!(PodPolicyReport)),
        ("cproxy get receive -o json", schema_for!(Vec<ReceivedRow>)),
        ("cproxy get denials -o json", schema_for!(Vec<DenialRow>)),
        ("cproxy status -o json", schema_for!(StatusRow)),
        ("cproxy resolve -o json", schema_for!(Vec<FrontendRow>)),
        ("cproxy resolve --explain NAME -o json", schema_for!(Explained<'_>)),
        ("cproxy resolve --policy -o json", schema_for!(PolicyAnswer)),
        ("cproxy explain NAME -o json", schema_for!(Answer<'_>)),
        ("cproxy explain --from ADDRESS NAME -o json", schema_for!(PolicyAnswer)),
        ("cproxy explain --to ADDRESS:PORT -o json", schema_for!(ReceiveAnswer)),
        ("cproxy check -o json", schema_for!(Vec<Requirement>)),
        ("cproxy trace -o json", schema_for!(TraceRow)),
        ("cproxy trace --summary -o json", schema_for!(Vec<SummaryRow>)),
    ]
}
