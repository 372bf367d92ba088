//! Errors, with the path of the field.

use cproxy_protobuf::FieldError;

/// Reason why an object cannot be transcoded, with the path of the field, such as `Service.spec.ports[0].name`.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {reason}")]
pub struct TranscodeError {
    path: String,
    reason: Reason,
}

/// Reason why a field cannot be transcoded.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Reason {
    #[error(transparent)]
    Field(FieldError),
    #[error("the message ends within a field")]
    Cut,
    #[error("the text is not UTF-8")]
    NotUtf8,
    #[error("the fields of a manager are not JSON")]
    NotJson,
    #[error("{0} is neither the type of a number nor that of a text")]
    NeitherIntNorString(u64),
    #[error("{0} is the kind of another object")]
    OtherKind(String),
    #[error("{0} was expected")]
    Expected(&'static str),
}

impl TranscodeError {
    /// The same error, seen from the message that has this field.
    pub(crate) fn within(mut self, field: &str) -> Self {
        let is_followed = self.path.starts_with(|first| first != '[');
        self.path.insert_str(0, if is_followed { "." } else { "" });
        self.path.insert_str(0, field);
        self
    }

    /// The same error, seen from the list that has this item.
    pub(crate) fn at(self, index: usize) -> Self {
        self.within(&format!("[{index}]"))
    }
}

impl From<FieldError> for Reason {
    fn from(error: FieldError) -> Self {
        match error {
            FieldError::Cut(_) => Self::Cut,
            FieldError::NotUtf8(_) => Self::NotUtf8,
            FieldError::Protobuf(_) | FieldError::WireType => Self::Field(error),
        }
    }
}

impl<R: Into<Reason>> From<R> for TranscodeError {
    fn from(reason: R) -> Self {
        Self { path: String::new(), reason: reason.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_path_of_its_field() {
        let error = TranscodeError::from(Reason::NotUtf8).within("name").at(2).within("ports").within("Service");
        assert_eq!(error.to_string(), "Service.ports[2].name: the text is not UTF-8");
        let error = TranscodeError::from(Reason::Cut).at(0).within("names");
        assert_eq!(error.to_string(), "names[0]: the message ends within a field");
    }
}
