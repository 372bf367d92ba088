//! Types whose JSON is not that of their protobuf message.

use cproxy_protobuf::{last, last_number};

use crate::{error::Reason, text::write_text};

/// Field of resource.Quantity with its text.
const QUANTITY: u32 = 1;

/// Fields of intstr.IntOrString.
const TYPE: u32 = 1;
const INT: u32 = 2;
const STRING: u32 = 3;

/// Appends a resource.Quantity. The API server writes the same canonical text in both encodings; a quantity without one
/// is Go's zero.
pub(crate) fn write_quantity(message: &[u8], out: &mut Vec<u8>) -> Result<(), Reason> {
    let text = last(message, QUANTITY)?.map_or(Ok("0"), |text| text.text())?;
    write_text(text, out);
    Ok(())
}

/// Appends an intstr.IntOrString: a number or a text, as its type says.
pub(crate) fn write_int_or_string(message: &[u8], out: &mut Vec<u8>) -> Result<(), Reason> {
    match last_number(message, TYPE)? {
        0 => write_int(last_number(message, INT)?, out),
        1 => write_text(last(message, STRING)?.map_or(Ok(""), |text| text.text())?, out),
        other => return Err(Reason::NeitherIntNorString(other)),
    }
    Ok(())
}

/// Appends an int32, as Go takes it from a varint: its lower half.
pub(crate) fn write_int(number: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(int(number).to_string().as_bytes());
}

/// Lower half of a varint.
#[expect(clippy::cast_possible_truncation, reason = "Go truncates it, too")]
pub(crate) fn int(number: u64) -> i32 {
    number as i32
}

#[cfg(test)]
mod tests {
    use cproxy_protobuf::FieldError;

    use super::*;

    fn written(write: fn(&[u8], &mut Vec<u8>) -> Result<(), Reason>, message: &[u8]) -> Result<String, Reason> {
        let mut out = Vec::new();
        write(message, &mut out).map(|()| String::from_utf8(out).unwrap())
    }

    #[test]
    fn a_quantity_is_its_text() {
        assert_eq!(written(write_quantity, b"\x0a\x05128Mi").as_deref(), Ok("\"128Mi\""));
        assert_eq!(written(write_quantity, b"").as_deref(), Ok("\"0\""));
        assert_eq!(written(write_quantity, b"\x08\x01"), Err(Reason::Field(FieldError::WireType)));
    }

    #[test]
    fn a_port_is_a_number_or_a_name() {
        assert_eq!(written(write_int_or_string, b"\x08\x00\x10\x50\x1a\x00").as_deref(), Ok("80"));
        assert_eq!(written(write_int_or_string, b"\x08\x01\x10\x00\x1a\x02ab").as_deref(), Ok("\"ab\""));
        assert_eq!(written(write_int_or_string, b"").as_deref(), Ok("0"));
        assert_eq!(written(write_int_or_string, b"\x08\x02"), Err(Reason::NeitherIntNorString(2)));
    }

    #[test]
    fn a_number_of_64_bits_is_cut_to_32() {
        assert_eq!((int(u64::MAX), int(1 << 32), int(0x8000_0000)), (-1, 0, i32::MIN));
    }
}
