//! Addresses and ranges of addresses, compared with the standard library's results.
//!
//! The first line of an input is an address, the second a range; both are optional.

#![no_main]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cproxy_core::{Address, AddressRange, Family, parse_address};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &str| {
    let (text, range) = input.split_once('\n').unwrap_or((input, ""));
    let address = parse_address(text);
    assert_eq!(address, by_std(text), "{text:?}");
    if let Some(address) = address {
        check_address(address);
    }
    if let Some(range) = AddressRange::parse(range) {
        check_range(range);
        if let Some(address) = address {
            assert_eq!(range.contains(address), contains_by_std(range, address), "{range} and {address}");
            assert!(!range.is_whole() || range.contains(address) == (range.family() == address.family()));
        }
    }
    check_range_text(range);
});

/// An address as the standard library parses it, which knows neither leading zeros nor that IPv4-mapped addresses are
/// IPv4.
fn by_std(text: &str) -> Option<Address> {
    let plain = |part: &str| match part.trim_start_matches('0') {
        "" if !part.is_empty() => "0".to_owned(),
        digits => digits.to_owned(),
    };
    let v4 = |text: &str| text.split('.').map(plain).collect::<Vec<_>>().join(".");
    let address = match text.rsplit_once(':') {
        Some((groups, end)) if end.contains('.') => format!("{groups}:{}", v4(end)).parse::<IpAddr>(),
        Some(_) => text.parse::<IpAddr>(),
        None => v4(text).parse(),
    };
    address.ok().map(Address::from)
}

fn check_address(address: Address) {
    let text = address.to_string();
    assert_eq!(parse_address(&text), Some(address), "what is printed is read again");
    assert_eq!(parse_address(&text).map(|again| again.to_string()), Some(text.clone()), "and printed the same");
    assert_eq!(text.parse(), Ok(IpAddr::from(address)), "and the standard library writes it the same way");
    assert_eq!(text.contains(':'), address.family() == Family::V6, "{text}");
    assert_eq!(Address::from_words(address.words()), address);
    assert_eq!(Address::from_octets(address.octets()), address);
}

fn check_range(range: AddressRange) {
    let text = range.to_string();
    assert_eq!(AddressRange::parse(&text), Some(range), "what is printed is read again");
    let (first, length) = text.split_once('/').unwrap();
    let first = parse_address(first).unwrap();
    assert!(range.contains(first), "{text} has its first address");
    assert_eq!(range.family(), first.family(), "{text}");
    assert_eq!(range.is_whole(), length == "0", "{text}");
}

/// Membership in a range, computed from the printed forms.
fn contains_by_std(range: AddressRange, address: Address) -> bool {
    let text = range.to_string();
    let (first, length) = text.split_once('/').unwrap();
    let length: u32 = length.parse().unwrap();
    match (first.parse().unwrap(), IpAddr::from(address)) {
        (IpAddr::V4(first), IpAddr::V4(address)) => prefix(first, length) == prefix(address, length),
        (IpAddr::V6(first), IpAddr::V6(address)) => {
            let prefix = |address: Ipv6Addr| address.to_bits().checked_shr(128 - length);
            prefix(first) == prefix(address)
        }
        _ => false,
    }
}

fn prefix(address: Ipv4Addr, length: u32) -> Option<u32> {
    address.to_bits().checked_shr(32 - length)
}

/// A range is an address that can be read, a slash and a length of its family.
fn check_range_text(text: &str) {
    let Some((address, length)) = text.split_once('/') else {
        return assert_eq!(AddressRange::parse(text), None, "{text:?}");
    };
    let bits = if text.contains(':') { 128 } else { 32 };
    let is_length = length.bytes().all(|byte| byte.is_ascii_digit()) && length.parse().is_ok_and(|n: u8| n <= bits);
    assert_eq!(AddressRange::parse(text).is_some(), is_length && by_std(address).is_some(), "{text:?}");
}
