//! metav1.Time: a message with seconds since 1970, in JSON an RFC 3339 time in UTC.

use cproxy_protobuf::last_number;

use crate::error::Reason;

/// Number of the field with the seconds in metav1.Timestamp.
const SECONDS: u32 = 1;

const SECONDS_OF_A_DAY: i64 = 24 * 60 * 60;

/// Days of 400 years, after which the calendar repeats.
const DAYS_OF_AN_ERA: i64 = 146_097;

/// Days between 1 March of the year 0 and 1 January 1970.
const DAYS_BEFORE_1970: i64 = 719_468;

/// Go's zero time: 1 January of the year 1.
const ZERO: i64 = -62_135_596_800;

/// Seconds in a metav1.Time; none in an empty one and in Go's zero time, which are null in JSON.
pub(crate) fn seconds(message: &[u8]) -> Result<Option<i64>, Reason> {
    let seconds = last_number(message, SECONDS)?.cast_signed();
    Ok((!message.is_empty() && seconds != ZERO).then_some(seconds))
}

/// Appends a time in quotes. Every number of seconds has one.
pub(crate) fn write_time(seconds: i64, out: &mut Vec<u8>) {
    let (year, month, day) = date(seconds.div_euclid(SECONDS_OF_A_DAY));
    let second = seconds.rem_euclid(SECONDS_OF_A_DAY);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let text = format!("\"{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z\"");
    out.extend_from_slice(text.as_bytes());
}

/// Year, month and day of a day since 1970, in the Gregorian calendar. The year starts in March here, so that the leap
/// day is its last one.
fn date(day: i64) -> (i64, i64, i64) {
    let day = day + DAYS_BEFORE_1970;
    let (era, day) = (day.div_euclid(DAYS_OF_AN_ERA), day.rem_euclid(DAYS_OF_AN_ERA));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (era * 400 + year + next, month, day)
}

#[cfg(test)]
mod tests {
    use cproxy_protobuf::FieldError;

    use super::*;

    fn written(seconds: i64) -> String {
        let mut out = Vec::new();
        write_time(seconds, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn times_are_in_utc() {
        let cases = [
            (0, "1970-01-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_767_225_599, "2025-12-31T23:59:59Z"),
            (4_107_542_399, "2100-02-28T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (ZERO, "0001-01-01T00:00:00Z"),
            (253_402_300_799, "9999-12-31T23:59:59Z"),
        ];
        for (seconds, text) in cases {
            assert_eq!(written(seconds), format!("\"{text}\""), "{seconds}");
        }
    }

    #[test]
    fn no_number_of_seconds_is_too_large() {
        assert!(written(i64::MAX).starts_with("\"29227"));
        assert!(written(i64::MIN).starts_with("\"-29227"));
    }

    #[test]
    fn every_day_follows_the_previous_one() {
        // From 1 January 1600 to the end of 2400.
        let days = (-135_140..157_420).map(date).collect::<Vec<_>>();
        assert_eq!((days.first(), days.last()), (Some(&(1600, 1, 1)), Some(&(2400, 12, 31))));
        for pair in days.windows(2) {
            let [(year, month, day), next] = *pair else { panic!("two days") };
            let is_next = next == (year, month, day + 1) || next == (year, month + 1, 1) || next == (year + 1, 1, 1);
            assert!(is_next && day < 32 && month < 13, "{pair:?}");
        }
    }

    #[test]
    fn an_empty_time_and_the_zero_time_are_null() {
        assert_eq!(seconds(b""), Ok(None));
        assert_eq!(seconds(b"\x08\x80\x92\xb8\xc3\x98\xfe\xff\xff\xff\x01"), Ok(None));
        assert_eq!(seconds(b"\x10\x05"), Ok(Some(0)));
        assert_eq!(seconds(b"\x08\x07\x10\x05"), Ok(Some(7)));
        assert_eq!(seconds(b"\x0a\x00"), Err(Reason::Field(FieldError::WireType)));
    }
}
