//! Page about the output of commands in JSON, from the schemas of its types.

use std::fmt::Write as _;

use serde_json::Value;

use crate::reference::escape;

/// Where a schema has the types that it refers to.
const DEFINITIONS: &str = "#/$defs/";

/// The page: first each command with its type, then each type with its fields.
pub(crate) fn page<S: Into<Value>>(schemas: impl IntoIterator<Item = (&'static str, S)>) -> String {
    let mut page = "# Output in JSON\n\nA watch (`-w`) prints an object a line, with `type` (`ADDED`, `MODIFIED` or \
                    `DELETED`) and the row as `object`.\n`cproxy get counters -o json` is an object with a number for \
                    each [counter](../docs/operations.md#counters).\nThis page is generated from the program's \
                    definition.\n\n| command | output |\n|---|---|\n"
        .to_owned();
    let mut types: Vec<(String, Value)> = Vec::new();
    let mut add = |name: &str, schema: &Value| {
        if !types.iter().any(|(known, _)| known == name) {
            types.push((name.to_owned(), schema.clone()));
        }
    };
    for (command, schema) in schemas {
        let schema = schema.into();
        writeln!(page, "| `{command}` | {} |", type_of(&schema)).ok();
        if schema.get("properties").is_some() {
            add(text(&schema, "title"), &schema);
        }
        let definitions = schema.get("$defs").and_then(Value::as_object);
        definitions.into_iter().flatten().for_each(|(name, of)| add(name, of));
    }
    types.iter().for_each(|(name, schema)| write_type(&mut page, name, schema));
    page
}

fn write_type(page: &mut String, name: &str, schema: &Value) {
    let about = text(schema, "description").replace('\n', " ");
    write!(page, "\n## {name}\n\n{about}\n\n").ok();
    if let Some(values) = schema.get("oneOf").and_then(Value::as_array) {
        page.push_str("| value | meaning |\n|---|---|\n");
        for value in values {
            writeln!(page, "| `{}` | {} |", text(value, "const"), meaning(value)).ok();
        }
        return;
    }
    page.push_str("| field | type | meaning |\n|---|---|---|\n");
    for (field, of) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
        writeln!(page, "| `{field}` | {} | {} |", type_of(of), meaning(of)).ok();
    }
}

/// Name of a type, with a link if the page has it.
fn type_of(schema: &Value) -> String {
    if let Some(name) = schema.get("$ref").and_then(Value::as_str) {
        return link(name.trim_start_matches(DEFINITIONS));
    }
    if let Some(types) = schema.get("anyOf").and_then(Value::as_array) {
        return types.iter().map(type_of).collect::<Vec<_>>().join(" or ");
    }
    match schema.get("type") {
        Some(Value::String(name)) if name == "array" => {
            format!("array of {}", schema.get("items").map(type_of).unwrap_or_default())
        }
        Some(Value::String(name)) if name == "object" => link(text(schema, "title")),
        Some(Value::String(name)) => name.clone(),
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" or "),
        _ => String::new(),
    }
}

fn link(name: &str) -> String {
    format!("[{name}](#{})", name.to_lowercase())
}

/// The definition's comment, with the word of JSON for no value.
fn meaning(schema: &Value) -> String {
    escape(&text(schema, "description").replace("`None`", "null").replace('\n', " "))
}

fn text<'s>(schema: &'s Value, key: &str) -> &'s str {
    schema.get(key).and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_has_a_type_and_a_meaning() {
        let page = page(cproxy::cli::schemas());
        for line in page.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<_> = line.trim_matches('|').split(" | ").map(str::trim).collect();
            assert!(cells.len() >= 2 && cells.iter().all(|cell| !cell.is_empty()), "{line}");
        }
        for part in ["## FrontendRow", "| `backends` | array of [BackendAddress](#backendaddress) |", "| `degraded` |"]
        {
            assert!(page.contains(part), "{part} is missing in {page}");
        }
    }
}
