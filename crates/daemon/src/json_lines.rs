//! Log lines as JSON objects: `timestamp`, `level`, `event` if the line has a stable name, `message`, and other fields.

use std::fmt;

use serde_json::{Map, Value};
use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::Writer,
        time::{FormatTime, SystemTime},
    },
    registry::LookupSpan,
};

/// Format of log lines as JSON objects.
pub(crate) struct JsonLines;

impl<S: Subscriber + for<'a> LookupSpan<'a>, N: for<'w> FormatFields<'w> + 'static> FormatEvent<S, N> for JsonLines {
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut line = Line::default();
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let metadata = event.metadata();
        line.0.insert("timestamp".to_owned(), time.into());
        line.0.insert("level".to_owned(), metadata.level().as_str().into());
        // Without a name of its own, a place in the code is called `event` and that place.
        if !metadata.name().starts_with("event ") {
            line.0.insert("event".to_owned(), metadata.name().into());
        }
        event.record(&mut line);
        writeln!(writer, "{}", Value::Object(line.0))
    }
}

/// Fields of a line.
#[derive(Default)]
struct Line(Map<String, Value>);

impl Visit for Line {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").into());
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use tracing_subscriber::{fmt::layer, layer::SubscriberExt as _, registry};

    use super::*;

    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Output {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_has_its_message_its_fields_and_its_name_if_it_has_one() {
        let output = Output::default();
        let writer = output.clone();
        let lines = registry().with(layer().event_format(JsonLines).with_writer(move || writer.clone()));
        tracing::subscriber::with_default(lines, || {
            tracing::info!(name: "ready", ready_ms = 7, share = 0.5, is_first = true, "ready \"at\" last\n");
            tracing::warn!("no name");
        });
        let text = String::from_utf8(output.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2, "{text}");
        let mut first = lines[0].as_object().unwrap().clone();
        let time = first.remove("timestamp").unwrap();
        assert!(time.as_str().unwrap().ends_with('Z'), "{time}");
        let expected = serde_json::json!({
            "level": "INFO", "event": "ready", "ready_ms": 7, "share": 0.5, "is_first": true,
            "message": "ready \"at\" last\n",
        });
        assert_eq!(Value::Object(first), expected);
        assert_eq!((&lines[1]["message"], &lines[1]["event"]), (&"no name".into(), &Value::Null));
    }
}
