//! Reading of JSON with the path of a field that is wrong. The path comes from the place in the text: a reader that
//! follows paths would be compiled once more for each type, as would one of bytes beside that of text.

use serde::{
    Deserialize,
    de::{DeserializeOwned, Error as _},
};

/// Wrong field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// Its path, such as `spec.ports[0].port`; empty for the whole object.
    pub path: String,
    /// Mistake in it.
    pub message: String,
}

impl std::fmt::Display for FieldError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.path.is_empty() { f.write_str(&self.message) } else { write!(f, "{}: {}", self.path, self.message) }
    }
}

/// Reads JSON.
///
/// # Errors
/// It is not UTF-8, no JSON, or of another form.
pub fn read_json<'a, T: Deserialize<'a>>(json: &'a [u8]) -> serde_json::Result<T> {
    serde_json::from_str(str::from_utf8(json).map_err(serde_json::Error::custom)?)
}

/// Reads an object.
///
/// # Errors
/// The first field that is wrong.
pub fn read_located<T: DeserializeOwned>(text: &str) -> Result<T, FieldError> {
    serde_json::from_str(text).map_err(|error| locate(text, &error))
}

/// The field of an error in a text.
pub(crate) fn locate(text: &str, error: &serde_json::Error) -> FieldError {
    let before = text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum::<usize>();
    let end = (before + error.column()).min(text.len());
    let (line, column) = (error.line(), error.column());
    let message = error.to_string();
    let message = message.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&message);
    FieldError { path: path(text.as_bytes().get(..end).unwrap_or_default()), message: message.to_owned() }
}

/// Part of a path: a field, or the index in a list.
enum Step {
    Field(String),
    Index(usize),
}

/// Path of the value that the beginning of a text ends in, or with.
fn path(text: &[u8]) -> String {
    // Whether each list or object around the place has a step.
    let (mut steps, mut around) = (Vec::<Step>::new(), Vec::<bool>::new());
    let (mut last, mut is_key) = (String::new(), false);
    // A list where there should be none has no index.
    let text = text.trim_ascii_end();
    let text = text.strip_suffix(b"[").unwrap_or(text);
    let mut rest = text.iter().enumerate();
    while let Some((start, byte)) = rest.next() {
        match byte {
            b'"' => {
                let mut is_escaped = false;
                let end = rest.by_ref().find(|(_, byte)| {
                    let is_end = **byte == b'"' && !is_escaped;
                    is_escaped = **byte == b'\\' && !is_escaped;
                    is_end
                });
                let end = end.map_or(text.len(), |(end, _)| end);
                let quoted = String::from_utf8_lossy(text.get(start + 1..end).unwrap_or_default());
                (last, is_key) = (quoted.into_owned(), true);
            }
            b':' if is_key => {
                // A field of the object in which the text is.
                if let Some(has_step) = around.last_mut() {
                    if std::mem::replace(has_step, true) {
                        steps.pop();
                    }
                    steps.push(Step::Field(std::mem::take(&mut last)));
                }
            }
            b'{' => around.push(false),
            b'[' => {
                around.push(true);
                steps.push(Step::Index(0));
            }
            b',' => {
                if let Some(Step::Index(index)) = steps.last_mut() {
                    *index += 1;
                }
            }
            b'}' | b']' if around.pop() == Some(true) => drop(steps.pop()),
            _ => {}
        }
        is_key = *byte == b'"' || is_key && byte.is_ascii_whitespace();
    }
    let mut path = String::new();
    for step in steps {
        match step {
            Step::Field(name) if path.is_empty() => path = name,
            Step::Field(name) => path = path + "." + &name,
            Step::Index(index) => path = format!("{path}[{index}]"),
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use cproxy_core::api::Service;

    use super::*;

    fn error(text: &str) -> String {
        read_located::<Service>(text).unwrap_err().to_string()
    }

    #[test]
    fn an_error_has_the_path_of_its_field() {
        for (text, expected) in [
            (r#"{"spec": 5}"#, "spec: invalid type: integer `5`, expected struct ServiceSpec"),
            (
                r#"{"metadata": {"name": "a"}, "spec": {"ports": [{"port": 80}, {"name": "b", "port": "high"}]}}"#,
                "spec.ports[1].port: invalid type: string \"high\", expected i32",
            ),
            (
                "{\"metadata\": {\"labels\":\n {\"a,]}\\\"\" : 7, \"b\": \"c\"}}}",
                "metadata.labels.a,]}\\\": invalid type: integer `7`, expected a string",
            ),
            (r#"{"spec": {"clusterIPs": {}}}"#, "spec.clusterIPs: invalid type: map, expected a sequence"),
            (r#"{"metadata": {"name": ["a"]}}"#, "metadata.name: invalid type: sequence, expected a string"),
            (
                r#"{"spec": {"clusterIPs": ["a", true]}}"#,
                "spec.clusterIPs[1]: invalid type: boolean `true`, expected a string",
            ),
            (r#"7"#, "invalid type: integer `7`, expected struct Service"),
        ] {
            assert_eq!(error(text), expected, "{text}");
        }
        assert!(read_located::<Service>(r#"{"metadata": {"name": "a"}, "unknown": [{"x": 1}, 2]}"#).is_ok());
    }
}
