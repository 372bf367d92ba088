//! The machine's clock, compared with the Date header of the API server.

use http::{HeaderMap, header::DATE};
use jiff::fmt::rfc2822;

use crate::diagnosis::{
    expiry::{duration, moment},
    finding::{Finding, Grade},
};

/// Largest difference that is normal. Tokens count to the second, but are issued for minutes.
const DIFFERENCE_SECONDS_MAX: i64 = 30;

/// Time of the Date header (RFC 9110, 6.6.1), in seconds since 1970.
pub(super) fn date(headers: &HeaderMap) -> Option<i64> {
    let text = headers.get(DATE)?.to_str().ok()?;
    Some(rfc2822::parse(text).ok()?.timestamp().as_second())
}

/// Line about a server whose answer counts: it was written between the two local times.
pub(super) fn compared(sent_at: i64, received_at: i64, server: Option<i64>) -> Finding {
    let Some(server) = server else {
        return Finding::optional("clock", Grade::Ok, format!("{}; the server has none", moment(received_at)));
    };
    // Behind: positive.
    let behind =
        if server > received_at { server.saturating_sub(received_at) } else { server.saturating_sub(sent_at).min(0) };
    if behind.abs() <= DIFFERENCE_SECONDS_MAX {
        return Finding::optional("clock", Grade::Ok, "as that of the API server");
    }
    let detail = format!("{}: tokens and certificates may not count yet, or no longer; set it", wrong(behind));
    Finding::optional("clock", Grade::Degraded, detail)
}

/// Line where the server's certificate does not count at the local time.
pub(super) fn unverified(local: i64, server: Option<i64>) -> Finding {
    match server.map(|server| server.saturating_sub(local)) {
        Some(behind) if behind.abs() > DIFFERENCE_SECONDS_MAX => {
            let detail = format!("{}, so that the certificate does not count: set it", wrong(behind));
            Finding::required("clock", Grade::Missing, detail)
        }
        Some(_) => Finding::optional("clock", Grade::Ok, "as that of the API server"),
        None => {
            let detail = format!("it is {} here, when the certificate does not count: compare", moment(local));
            Finding::optional("clock", Grade::Degraded, detail)
        }
    }
}

fn wrong(behind: i64) -> String {
    let direction = if behind > 0 { "behind" } else { "ahead of" };
    format!("{} {direction} that of the API server", duration(behind.saturating_abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_date_header_is_read() {
        let of = |text: &str| date(&[(DATE, text.parse().unwrap())].into_iter().collect());
        assert_eq!(of("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777));
        assert_eq!(of("yesterday"), None);
        assert_eq!(date(&HeaderMap::new()), None);
    }

    #[test]
    fn a_difference_of_half_a_minute_is_normal() {
        for (sent, received, server, grade, text) in [
            (1_000, 1_000, 1_030, Grade::Ok, "as that"),
            (1_000, 1_040, 1_020, Grade::Ok, "as that"),
            (1_000, 1_000, 1_031, Grade::Degraded, "31 s behind that of the API server"),
            (1_000, 1_005, 900, Grade::Degraded, "100 s ahead of that of the API server"),
            (0, 0, i64::MAX, Grade::Degraded, "behind"),
        ] {
            let line = compared(sent, received, Some(server));
            assert!(line.grade == grade && line.detail.starts_with(text) || text == "behind", "{line:?}");
        }
        assert_eq!(compared(0, 0, None).grade, Grade::Ok);
    }

    #[test]
    fn a_certificate_that_does_not_count_is_the_clocks_fault_if_that_is_wrong() {
        let line = unverified(1_000, Some(1_000 + 400 * 86_400));
        assert!(line.grade == Grade::Missing && line.detail.starts_with("400 days behind"), "{line:?}");
        assert_eq!(unverified(1_000, Some(1_010)).grade, Grade::Ok);
        assert_eq!(unverified(1_000, None).grade, Grade::Degraded);
    }
}
