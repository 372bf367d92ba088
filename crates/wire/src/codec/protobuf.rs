//! Reader of the protobuf messages around an object, without copies. prost decodes the object itself.
//!
//! All fields before an error count, so that a message that is broken or cut still has its beginning.

use cproxy_core::{api::Metadata, printable};
use cproxy_protobuf::{FieldError, Value};

use crate::codec::{error::DecodeError, split::protobuf::MAGIC};

/// metav1.WatchEvent.
#[derive(Debug, Default)]
pub(crate) struct Event<'a> {
    /// Type of the event.
    pub(crate) change: &'a str,
    pub(crate) object: Envelope<'a>,
}

/// runtime.Unknown: an object and its kind.
#[derive(Debug, Default)]
pub(crate) struct Envelope<'a> {
    kind: &'a str,
    content_encoding: &'a str,
    /// The object, or its beginning.
    pub(crate) raw: &'a [u8],
}

/// Field with a length.
struct Field<'a> {
    number: u32,
    bytes: &'a [u8],
    /// The message does not end before the field.
    is_whole: bool,
}

impl<'a> Event<'a> {
    pub(crate) fn read(&mut self, bytes: &'a [u8]) -> Result<(), DecodeError> {
        read_fields(bytes, |field| match field.number {
            1 => field.text().map(|text| self.change = text),
            // runtime.RawExtension
            2 => read_fields(field.bytes, |field| match field.number {
                1 => self.object.read(field.bytes),
                _ => Ok(()),
            }),
            _ => Ok(()),
        })
    }
}

impl<'a> Envelope<'a> {
    pub(crate) fn read(&mut self, bytes: &'a [u8]) -> Result<(), DecodeError> {
        let unknown = bytes.strip_prefix(&MAGIC).ok_or(DecodeError::NoMagic)?;
        read_fields(unknown, |field| match field.number {
            1 => field.kind().map(|kind| self.kind = kind),
            2 => {
                self.raw = field.bytes;
                Ok(())
            }
            3 => field.text().map(|text| self.content_encoding = text),
            _ => Ok(()),
        })
    }

    /// The object, if it is of this kind.
    pub(crate) fn object(&self, kind: &str) -> Result<&'a [u8], DecodeError> {
        check_kind(self.kind, kind)?;
        match self.content_encoding {
            "" => Ok(self.raw),
            other => Err(DecodeError::Encoded(printable(other))),
        }
    }
}

impl<'a> Field<'a> {
    fn text(&self) -> Result<&'a str, DecodeError> {
        if !self.is_whole {
            return Err(DecodeError::Cut);
        }
        str::from_utf8(self.bytes).map_err(|_| DecodeError::NotUtf8)
    }

    /// Kind in a runtime.TypeMeta.
    fn kind(&self) -> Result<&'a str, DecodeError> {
        let mut kind = "";
        read_fields(self.bytes, |field| match field.number {
            2 => field.text().map(|text| kind = text),
            _ => Ok(()),
        })?;
        Ok(kind)
    }
}

impl From<FieldError> for DecodeError {
    fn from(error: FieldError) -> Self {
        match error {
            FieldError::Protobuf(error) => Self::Protobuf(error),
            FieldError::Cut(_) => Self::Cut,
            // A number is no text either.
            FieldError::NotUtf8(_) | FieldError::WireType => Self::NotUtf8,
        }
    }
}

/// Checks the runtime.TypeMeta of a list.
pub(crate) fn check_type(type_meta: &[u8], kind: &str) -> Result<(), DecodeError> {
    let found = Field { number: 1, bytes: type_meta, is_whole: true }.kind()?;
    check_kind(found, kind)
}

fn check_kind(found: &str, expected: &str) -> Result<(), DecodeError> {
    if found == expected {
        return Ok(());
    }
    let found = if found.is_empty() { "no kind".to_owned() } else { printable(found) };
    Err(DecodeError::Kind(found, expected.to_owned()))
}

/// Names and version of an object that is too long or broken, as far as they can be read. The API server writes them
/// before any long field.
pub(crate) fn names(object: &[u8]) -> Metadata {
    let mut names = Metadata::default();
    // The fields before an error count.
    read_fields(object, |field| match field.number {
        1 => read_names(&mut names, field.bytes),
        _ => Ok(()),
    })
    .ok();
    names
}

fn read_names(names: &mut Metadata, metadata: &[u8]) -> Result<(), DecodeError> {
    read_fields(metadata, |field| {
        let name = match field.number {
            1 => &mut names.name,
            3 => &mut names.namespace,
            6 => &mut names.resource_version,
            _ => return Ok(()),
        };
        field.text().map(|text| text.clone_into(name))
    })
}

/// Reads the fields that have a length, and skips all others.
fn read_fields<'a>(
    mut bytes: &'a [u8],
    mut read: impl FnMut(Field<'a>) -> Result<(), DecodeError>,
) -> Result<(), DecodeError> {
    while !bytes.is_empty() {
        match cproxy_protobuf::Field::split_off(&mut bytes) {
            Ok(field) => {
                if let Value::Bytes(bytes) = field.value {
                    read(Field { number: field.number, bytes, is_whole: true })?;
                }
            }
            Err(error) => {
                if let FieldError::Cut(number) = error {
                    read(Field { number, bytes, is_whole: false })?;
                }
                return Err(error.into());
            }
        }
    }
    Ok(())
}
