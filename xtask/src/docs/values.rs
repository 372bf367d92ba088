//! Page about the values of the Helm chart, from their schema.

use std::{fmt::Write as _, fs, path::Path};

use anyhow::{Context as _, Result};
use serde_json::Value;

const SCHEMA: &str = "images/kubernetes/helm/cproxy/values.schema.json";

/// The page: a line for each value.
pub(super) fn page(root: &Path) -> Result<String> {
    let file = root.join(SCHEMA);
    let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    let schema = serde_json::from_str(&text).with_context(|| format!("{} is no JSON", file.display()))?;
    let mut page = format!(
        "# Values of the Helm chart\n\nThe chart is in [images/kubernetes/helm](../images/kubernetes/helm/cproxy). \
         This page is generated from its schema\n([values.schema.json](../{SCHEMA})).\n\n| value | type | meaning \
         |\n|---|---|---|\n"
    );
    write_properties(&mut page, "", &schema);
    Ok(page)
}

fn write_properties(page: &mut String, prefix: &str, schema: &Value) {
    for (name, property) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
        let path = format!("{prefix}{name}");
        let text = |field: &str| property.get(field).and_then(Value::as_str).unwrap_or_default().replace('|', "\\|");
        let choices = property.get("enum").and_then(Value::as_array).into_iter().flatten();
        let choices: Vec<_> = choices.map(|choice| format!("`{choice}`")).collect();
        let choices = if choices.is_empty() { String::new() } else { format!(" One of {}.", choices.join(", ")) };
        // Writing to a text cannot fail.
        writeln!(page, "| `{path}` | {} | {}{choices} |", text("type"), text("description")).ok();
        write_properties(page, &format!("{path}."), property);
    }
}
