//! Rules for the names of objects (RFC 1123, as the API server has them).

/// Whether `name` may be a namespace or a Service.
pub(crate) fn is_label(name: &str) -> bool {
    name.len() <= 63 && is_part(name)
}

/// Whether `name` may be a Node or a ServiceAccount.
pub(crate) fn is_subdomain(name: &str) -> bool {
    name.len() <= 253 && name.split('.').all(is_part)
}

fn is_part(part: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !part.is_empty() && part.bytes().all(is_allowed) && !part.starts_with('-') && !part.ends_with('-')
}
