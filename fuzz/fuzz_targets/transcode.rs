//! Objects in protobuf that become JSON. The first byte of an input is the kind, the others are the object.

#![no_main]

use cproxy_transcode::{Kind, write_json};
use libfuzzer_sys::fuzz_target;
use serde::de::IgnoredAny;

fuzz_target!(|input: &[u8]| {
    let Some((&command, protobuf)) = input.split_first() else { return };
    let kind = Kind::ALL[usize::from(command) % Kind::ALL.len()];
    let standalone = written(kind, protobuf, true);
    let item = written(kind, protobuf, false);
    let start = format!("{{\"kind\":\"{}\",\"apiVersion\":\"{}\",", kind.name(), kind.api_version());
    assert_eq!(standalone, item.map(|item| item.replacen('{', &start, 1)), "only the type differs");
});

/// The JSON, if the object has one.
fn written(kind: Kind, protobuf: &[u8], with_type: bool) -> Option<String> {
    const BEFORE: &[u8] = b"before";
    let mut out = BEFORE.to_vec();
    let result = write_json(kind, protobuf, with_type, &mut out);
    let json = out.strip_prefix(BEFORE).expect("it is only appended to");
    if let Err(error) = result {
        let text = error.to_string();
        assert!(text.starts_with(kind.name()) && !text.contains('\n'), "{text:?}");
        assert_eq!(json, b"", "nothing is left after an error");
        return None;
    }
    let json = str::from_utf8(json).expect("the JSON is UTF-8");
    serde_json::from_str::<IgnoredAny>(json).expect("it is JSON");
    Some(json.to_owned())
}
