//! Fields of protobuf messages, for messages of which only some fields are read, left out or passed on verbatim. prost
//! decodes whole messages.

mod fields;
mod writer;

pub use fields::{Field, FieldError, Fields, Value, fields, last, last_number};
pub use writer::{push_field, push_header, push_number};
