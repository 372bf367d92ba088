//! Counters of the programs, and gauges of the agent.

use super::{
    columns::{align_columns, or_dash},
    json::pretty_json,
};

/// Counters as the JSON object of the contract.
///
/// # Errors
/// Never for these types.
pub fn counters_json(counters: &[(String, u64)]) -> serde_json::Result<String> {
    let object: serde_json::Map<_, _> = counters.iter().map(|(name, count)| (name.clone(), (*count).into())).collect();
    pretty_json(&object)
}

/// Counters as aligned columns, the last of which is their meaning, if it is to be shown.
#[must_use]
pub fn counters_text(counters: &[(String, u64)], meaning: Option<fn(&str) -> Option<&'static str>>) -> String {
    let header = ["COUNTER", "VALUE", if meaning.is_some() { "MEANING" } else { "" }].map(str::to_owned);
    let help = |name: &str| meaning.and_then(|meaning| meaning(name)).unwrap_or_default().to_owned();
    let line = |(name, count): &(String, u64)| [or_dash(Some(name)), count.to_string(), help(name)];
    align_columns(&std::iter::once(header).chain(counters.iter().map(line)).collect::<Vec<_>>())
}
