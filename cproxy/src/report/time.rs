//! Times in words.

/// A time in its largest unit.
#[must_use]
pub(crate) fn time(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 if seconds % 3600 >= 60 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}
