//! Loop of one resource's list and watch: carries out the decisions of [`WatchState::step`]. Its I/O is a trait, so
//! that tests can script it.

use std::{sync::Arc, time::Duration};

use tokio::time::timeout_at;

use crate::{
    codec::resource::WatchedResource,
    watch::{
        event::WatchEvent,
        failure::{ApiError, Operation},
        io::{Collection, Input, Log, Next, Pause, Request},
        selectors::Selectors,
        state::{History, WatchState, watch_time},
        view_token::ViewToken,
    },
};

/// I/O of a watch.
pub(crate) trait ApiSource<K> {
    /// Sends a request and waits until the server has accepted it. Returns the view that it shows. [`Self::receive`]
    /// reads the response.
    async fn request(&mut self, request: Request) -> Result<ViewToken, ApiError>;

    /// Reads the next part of the response. It fails if it lacks an object for too long ([`Operation::silence_max`]).
    /// If it is dropped, the response is not read further.
    async fn receive(&mut self, operation: Operation) -> Result<Input<K>, ApiError>;

    /// Publishes an event. Waits while the receiver's queue is full.
    async fn publish(&mut self, event: WatchEvent<K>);

    async fn pause(&mut self, pause: Pause);

    /// Time after which the server is asked to end the next watch.
    fn watch_time(&mut self) -> Duration {
        watch_time()
    }

    /// Whether the next watch shows the last version again.
    fn repeats_last_version(&self) -> bool {
        false
    }

    /// Whether the objects are listed anew rather than a watch resumed.
    fn must_list(&self) -> bool {
        false
    }

    fn log(&mut self, log: Log);

    /// Address of the server that was used last, for messages.
    fn server(&self) -> Arc<str>;
}

/// Follows the objects with these selectors. Never returns.
/// `spreads_lists`: many clients like this one may list at once.
pub(crate) async fn follow<K: WatchedResource>(
    source: &mut impl ApiSource<K>,
    selectors: Selectors<'_>,
    spreads_lists: bool,
) {
    let (mut state, mut history) = (WatchState::new(), History::new(spreads_lists));
    let mut next = Next::Request;
    loop {
        let input = match next {
            Next::Read => read(source, &state, &history).await,
            Next::Request => send::<K>(source, &mut state, selectors).await,
            Next::RequestAfter(pause) => {
                source.pause(pause).await;
                send::<K>(source, &mut state, selectors).await
            }
        };
        let server = source.server();
        let collection = Collection { server: &server, selectors };
        let (new, output) = state.step(input.unwrap_or_else(Input::Failed), collection, &mut history);
        state = new;
        if let Some(log) = output.log {
            source.log(log);
        }
        if let Some(event) = output.event {
            source.publish(event).await;
        }
        next = output.next;
    }
}

async fn read<K>(source: &mut impl ApiSource<K>, state: &WatchState, history: &History) -> Result<Input<K>, ApiError> {
    let input = source.receive(state.operation());
    match state.due(history) {
        Some(due) => timeout_at(due, input).await.unwrap_or(Ok(Input::Unconfirmed)),
        None => input.await,
    }
}

async fn send<K: WatchedResource>(
    source: &mut impl ApiSource<K>,
    state: &mut WatchState,
    selectors: Selectors<'_>,
) -> Result<Input<K>, ApiError> {
    if source.must_list() {
        state.relist();
    }
    let (watch_time, repeats_last_version) = (source.watch_time(), source.repeats_last_version());
    let request = state.request::<K>(selectors, watch_time, repeats_last_version);
    source.request(request).await.map(Input::Accepted)
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, future::pending};

    use cproxy_core::api::{Metadata, Service};

    use super::*;
    use crate::{
        codec::{
            decode::Decoded,
            message::{ListMetadata, Message},
            status::Status,
        },
        watch::selectors::FieldSelector,
    };

    type Response = Result<Vec<Result<Input<Service>, ApiError>>, ApiError>;

    /// Server with scripted responses, and a transcript of what the loop did.
    #[derive(Default)]
    struct Script {
        responses: VecDeque<Response>,
        /// View of each response that is accepted.
        views: VecDeque<ViewToken>,
        response: VecDeque<Result<Input<Service>, ApiError>>,
        transcript: Vec<String>,
    }

    impl ApiSource<Service> for Script {
        async fn request(&mut self, request: Request) -> Result<ViewToken, ApiError> {
            self.transcript.push(format!("{:?} {}", request.operation, brief(&request.target)));
            let Some(response) = self.responses.pop_front() else { return pending().await };
            self.response = response?.into();
            Ok(self.views.pop_front().unwrap_or_default())
        }

        async fn receive(&mut self, _: Operation) -> Result<Input<Service>, ApiError> {
            let Some(input) = self.response.pop_front() else { return pending().await };
            input
        }

        async fn publish(&mut self, event: WatchEvent<Service>) {
            self.transcript.push(match event {
                WatchEvent::Listed(object) => format!("listed {}", name(&object)),
                WatchEvent::Applied(object) => format!("applied {}", name(&object)),
                WatchEvent::Deleted(object) => format!("deleted {}", name(&object)),
                WatchEvent::ListDone(version) => format!("done {version}"),
                WatchEvent::Bookmark(version) => format!("bookmark {version}"),
                other => format!("{other:?}"),
            });
        }

        async fn pause(&mut self, pause: Pause) {
            let end = if pause.ends_on_network_change { "or the network" } else { "" };
            self.transcript.push(format!("pause {end}").trim_end().to_owned());
        }

        fn log(&mut self, log: Log) {
            self.transcript.push(match log {
                Log::Debug(message) => format!("debug {message}"),
                Log::Info(message) => format!("info {message}"),
                Log::Warn(message) => format!("warn {message}"),
            });
        }

        fn server(&self) -> Arc<str> {
            "https://api:6443/".into()
        }
    }

    /// Query of a request, without the parameters that all have.
    fn brief(target: &str) -> String {
        let is_brief = |parameter: &&str| {
            ["fieldSelector", "resourceVersion=", "continue"].iter().any(|name| parameter.starts_with(name))
        };
        let query = target.split_once('?').unwrap().1;
        query.split('&').filter(is_brief).collect::<Vec<_>>().join(" ")
    }

    fn name(object: &Decoded<Service>) -> &str {
        &object.meta().name
    }

    fn object(name: &str, version: &str) -> Decoded<Service> {
        let metadata = Metadata { name: name.to_owned(), resource_version: version.to_owned(), ..Metadata::default() };
        let mut service = Box::<Service>::default();
        service.metadata = metadata;
        Decoded::Object(service)
    }

    fn applied(name: &str, version: &str) -> Result<Input<Service>, ApiError> {
        Ok(Input::Received(Message::Applied(object(name, version))))
    }

    fn deleted(name: &str, version: &str) -> Result<Input<Service>, ApiError> {
        Ok(Input::Received(Message::Deleted(object(name, version))))
    }

    fn bookmark(version: &str) -> Result<Input<Service>, ApiError> {
        Ok(Input::Received(Message::Bookmark(Some(version.to_owned()))))
    }

    /// End of a list at this version, or of a watch.
    fn end(version: Option<&str>) -> Result<Input<Service>, ApiError> {
        Ok(Input::Ended(ListMetadata { resource_version: version.map(str::to_owned) }))
    }

    fn refused(code: i32) -> ApiError {
        ApiError::Refused(Box::new(Status { message: "m".to_owned(), code, details: None }))
    }

    /// Plays the script to its end and returns the transcript.
    async fn play(responses: impl IntoIterator<Item = Response>) -> Vec<String> {
        play_for(Duration::from_secs(1), responses, []).await
    }

    async fn play_for(
        time: Duration,
        responses: impl IntoIterator<Item = Response>,
        views: impl IntoIterator<Item = ViewToken>,
    ) -> Vec<String> {
        let (responses, views) = (responses.into_iter().collect(), views.into_iter().collect());
        let mut script = Script { responses, views, ..Script::default() };
        let selectors = Selectors { labels: "", fields: FieldSelector::Optional("a=b") };
        let following = follow::<Service>(&mut script, selectors, true);
        tokio::time::timeout(time, following).await.unwrap_err();
        script.transcript
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_is_followed_by_watches_that_are_resumed_where_they_ended() {
        let list = vec![applied("a", "3"), end(Some("5"))];
        let watch = vec![applied("b", "6"), end(None)];
        let next = vec![deleted("b", "7"), bookmark("9"), Err(ApiError::Cut)];
        assert_eq!(
            play([Ok(list), Ok(watch), Ok(next)]).await,
            [
                "List fieldSelector=a%3Db resourceVersion=0",
                "ListStarted",
                "listed a",
                "done 5",
                "Watch fieldSelector=a%3Db resourceVersion=5",
                "applied b",
                "Watch fieldSelector=a%3Db resourceVersion=6",
                "deleted b",
                "bookmark 9",
                "Watch fieldSelector=a%3Db resourceVersion=9",
            ]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn an_older_server_is_asked_without_the_optional_selector() {
        let list = vec![applied("a", "3"), end(Some("5"))];
        assert_eq!(
            play([Err(refused(400)), Ok(list)]).await,
            [
                "List fieldSelector=a%3Db resourceVersion=0",
                "info cannot list services at https://api:6443/: m (400); asking again without fieldSelector a=b, for \
                 Kubernetes before 1.31",
                "List resourceVersion=0",
                "ListStarted",
                "listed a",
                "done 5",
                "Watch resourceVersion=5",
            ]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_logged_before_the_pause_and_a_list_begins_anew() {
        let no_route = || ApiError::Connection("no route".into());
        let cut = vec![applied("a", "3"), Err(ApiError::Cut)];
        assert_eq!(
            play([Err(no_route()), Ok(cut), Err(refused(503))]).await,
            [
                "List fieldSelector=a%3Db resourceVersion=0",
                "warn cannot list services at https://api:6443/: no route; trying again",
                "pause or the network",
                "List fieldSelector=a%3Db resourceVersion=0",
                "ListStarted",
                "listed a",
                "warn cannot list services at https://api:6443/: the connection was closed in the middle of the \
                 response; trying again",
                "pause",
                "List fieldSelector=a%3Db resourceVersion=0",
                "warn cannot list services at https://api:6443/: m (503); trying again",
                "pause",
                "List fieldSelector=a%3Db resourceVersion=0",
            ]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_watch_that_is_too_old_comes_a_list() {
        assert_eq!(
            play([Ok(vec![end(Some("5"))]), Err(refused(410)), Ok(vec![end(Some("6"))])]).await,
            [
                "List fieldSelector=a%3Db resourceVersion=0",
                "ListStarted",
                "done 5",
                "Watch fieldSelector=a%3Db resourceVersion=5",
                "info the watch of services is too old to be resumed: listing anew",
                "pause",
                "List fieldSelector=a%3Db resourceVersion=5",
                "ListStarted",
                "done 6",
                "Watch fieldSelector=a%3Db resourceVersion=6",
            ]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_another_view_accepts_becomes_a_list() {
        let list = |version| Ok(vec![applied("a", "3"), end(Some(version))]);
        // The response in the other view is not read.
        let other = Ok(vec![applied("b", "6"), end(None)]);
        let views = [
            ViewToken::default(),
            ViewToken::named("x"),
            ViewToken::named("x"),
            ViewToken::named("x"),
            ViewToken::named("x"),
        ];
        assert_eq!(
            play_for(Duration::from_secs(1), [list("5"), other, list("7"), Ok(vec![bookmark("9"), end(None)])], views)
                .await,
            [
                "List fieldSelector=a%3Db resourceVersion=0",
                "ListStarted",
                "listed a",
                "done 5",
                "Watch fieldSelector=a%3Db resourceVersion=5",
                "info https://api:6443/ shows another view of services (x, before: all): listing anew",
                "pause",
                "List fieldSelector=a%3Db resourceVersion=5",
                "ListStarted",
                "listed a",
                "done 7",
                "Watch fieldSelector=a%3Db resourceVersion=7",
                "bookmark 9",
                "Watch fieldSelector=a%3Db resourceVersion=9",
            ]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_resumed_watch_that_shows_nothing_becomes_a_list() {
        let list = |version| Ok(vec![applied("a", "3"), end(Some(version))]);
        let responses = [list("5"), Ok(vec![end(None)]), Ok(vec![]), Err(refused(504)), list("4"), Ok(vec![])];
        assert_eq!(
            play_for(Duration::from_secs(3600), responses, []).await,
            [
                "List fieldSelector=a%3Db resourceVersion=0",
                "ListStarted",
                "listed a",
                "done 5",
                "Watch fieldSelector=a%3Db resourceVersion=5",
                "pause",
                "Watch fieldSelector=a%3Db resourceVersion=5",
                "info https://api:6443/ has not confirmed the services since their watch was resumed: listing anew",
                "pause",
                "List fieldSelector=a%3Db resourceVersion=5",
                "warn cannot list services at https://api:6443/: m (504); trying again",
                "pause",
                "List fieldSelector=a%3Db resourceVersion=0",
                "ListStarted",
                "listed a",
                "done 4",
                "Watch fieldSelector=a%3Db resourceVersion=4",
            ]
        );
    }
}
