//! Whether network policies allow traffic, and which rule says so.

use serde::Serialize;

use super::columns::{align_columns, or_dash};

/// Whether network policies allow traffic from one pod or address to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PolicyAnswer {
    /// allowed or denied, or mixed: it depends on the addresses.
    pub verdict: String,
    /// namespace/name of the pod that calls, or its address if no pod has it.
    pub from: String,
    /// namespace/name of the pod that is called, or its address if no pod has it.
    pub to: String,
    /// TCP, UDP or SCTP.
    pub protocol: String,
    /// Port that is called.
    pub port: u16,
    /// Each address of the caller with each of the called pod that is of the same family.
    pub pairs: Vec<PolicyPair>,
    /// Facts about the addresses, such as another pod with the same one.
    pub notes: Vec<String>,
}

/// Verdicts about traffic between two addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PolicyPair {
    /// Address of the caller.
    pub from_address: String,
    /// Address that is called.
    pub to_address: String,
    /// allowed if both sides allow it, or denied.
    pub verdict: String,
    /// Verdict of the caller's policies; `None` if no pod of the manifests has its address.
    pub egress: Option<PolicyVerdict>,
    /// Verdict of the called pod's policies; `None` if no pod of the manifests has its address.
    pub ingress: Option<PolicyVerdict>,
}

/// Verdict of the policies of one pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PolicyVerdict {
    /// allowed or denied.
    pub verdict: String,
    /// Word for the cause: rule, no-rule, not-isolated, itself, own-node or host-network.
    pub code: String,
    /// Kind and namespace/name of the policy whose rule decided; `None` if no rule did.
    pub policy: Option<String>,
    /// Position of the rule among those of this direction, the first is 0; `None` as `policy`.
    pub rule: Option<u32>,
    /// namespace/name of each policy that isolates the pod in this direction: all is denied that no rule allows.
    pub isolated_by: Vec<String>,
    /// Cause, for people.
    pub reason: String,
}

/// Verdict of traffic that is allowed.
pub(crate) const ALLOWED: &str = "allowed";
/// Verdict of traffic that is denied.
pub(crate) const DENIED: &str = "denied";
/// Verdict of traffic that depends on the addresses.
const MIXED: &str = "mixed";

/// Maximum number of names in a text.
const NAMED_MAX: usize = 5;

/// The first of many names, and the number of the others.
pub(crate) fn some_of(names: &[String]) -> String {
    let shown = names.iter().take(NAMED_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(NAMED_MAX) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Verdict that all of some parts have.
pub(crate) fn common_verdict<'a>(verdicts: impl IntoIterator<Item = &'a str>) -> &'static str {
    let (mut allowed, mut denied) = (false, false);
    for verdict in verdicts {
        allowed |= verdict == ALLOWED;
        denied |= verdict == DENIED;
    }
    match (allowed, denied) {
        (true, true) => MIXED,
        (_, true) => DENIED,
        (_, false) => ALLOWED,
    }
}

impl PolicyPair {
    /// Verdict of both sides, of which one that is not judged allows all.
    pub(crate) fn new(from: String, to: String, egress: Option<PolicyVerdict>, ingress: Option<PolicyVerdict>) -> Self {
        let is_denied = [&egress, &ingress].into_iter().flatten().any(|side| side.verdict == DENIED);
        let verdict = if is_denied { DENIED } else { ALLOWED }.to_owned();
        Self { from_address: from, to_address: to, verdict, egress, ingress }
    }
}

impl PolicyAnswer {
    /// Whether all of it is allowed.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.verdict == ALLOWED
    }

    /// The answer as text: a line with the verdict, and one for each side; for each pair of addresses, if they differ.
    #[must_use]
    pub fn text(&self) -> String {
        let Self { verdict, from, to, protocol, port, pairs, notes } = self;
        let to_port = if to.contains(':') { format!("[{to}]:{port}") } else { format!("{to}:{port}") };
        let notes: String = notes.iter().map(|note| or_dash(Some(note)) + "\n").collect();
        let notes = if notes.is_empty() { notes } else { format!("\n{notes}") };
        format!("{verdict}: {from} to {to_port}/{protocol}\n\n{}{notes}", self.table(pairs))
    }

    fn table(&self, pairs: &[PolicyPair]) -> String {
        let is_same = pairs.windows(2).all(|pair| match pair {
            [a, b] => (&a.egress, &a.ingress) == (&b.egress, &b.ingress),
            _ => true,
        });
        if is_same {
            let lines = pairs.first().into_iter().flat_map(|pair| self.lines(pair));
            let header = ["SIDE", "POD", "VERDICT", "WHY"].map(str::to_owned);
            return align_columns(&std::iter::once(header).chain(lines).collect::<Vec<_>>());
        }
        let lines = pairs.iter().flat_map(|pair| {
            let addresses = [&pair.from_address, &pair.to_address];
            self.lines(pair).map(|[side, pod, verdict, why]| {
                let [from, to] = addresses.map(Clone::clone);
                [from, to, side, pod, verdict, why]
            })
        });
        let header = ["FROM", "TO", "SIDE", "POD", "VERDICT", "WHY"].map(str::to_owned);
        align_columns(&std::iter::once(header).chain(lines).collect::<Vec<_>>())
    }

    /// The verdict on one pair as a line.
    #[must_use]
    pub fn line(&self) -> String {
        let Self { verdict, from, to, protocol, port, pairs, notes } = self;
        let sides = pairs.iter().flat_map(|pair| [&pair.egress, &pair.ingress]).flatten();
        let reasons = sides.map(|side| &side.reason).chain(notes);
        let reasons = reasons.map(|reason| format!("; {}", or_dash(Some(reason)))).collect::<String>();
        format!("{verdict}: {from} to {to}:{port}/{protocol}{reasons}\n")
    }

    fn lines(&self, pair: &PolicyPair) -> [[String; 4]; 2] {
        let line = |side: &str, pod: &str, verdict: Option<&PolicyVerdict>| match verdict {
            Some(PolicyVerdict { verdict, reason, .. }) => [side, pod, verdict, reason].map(|cell| or_dash(Some(cell))),
            None => [side, "", "", "no pod of the manifests has this address"].map(|cell| or_dash(Some(cell))),
        };
        [line("egress", &self.from, pair.egress.as_ref()), line("ingress", &self.to, pair.ingress.as_ref())]
    }
}
