//! Single Services, for questions that the watches do not answer: they leave out those that cproxy does not serve.

use bytes::Bytes;
use cproxy_core::{Address, ServiceName, api::Service};
use http::{
    Request, StatusCode,
    header::{ACCEPT, HeaderValue},
};
use serde::Deserialize;

use crate::{client::api_client::ApiClient, located::read_json, transport::link::BoxError};

/// List of Services in JSON.
#[derive(Deserialize)]
struct ServiceList {
    #[serde(default)]
    items: Vec<Service>,
}

/// Service of that name, whether cproxy serves it or not, from the server's cache. The right to list Services suffices.
///
/// # Errors
/// The server cannot be reached, refuses, or its response is no list.
pub async fn service_named(client: &ApiClient, name: &ServiceName) -> Result<Option<Service>, BoxError> {
    let ServiceName { namespace, name } = name;
    first(client, &format!("/api/v1/namespaces/{namespace}/services?fieldSelector=metadata.name%3D{name}")).await
}

/// Service with that first ClusterIP; as [`service_named`].
///
/// # Errors
/// As [`service_named`].
pub async fn service_with_cluster_ip(client: &ApiClient, address: Address) -> Result<Option<Service>, BoxError> {
    let address = address.to_string().replace(':', "%3A");
    first(client, &format!("/api/v1/services?fieldSelector=spec.clusterIP%3D{address}")).await
}

async fn first(client: &ApiClient, target: &str) -> Result<Option<Service>, BoxError> {
    let request = Request::get(format!("{target}&resourceVersion=0"));
    let request = request.header(ACCEPT, HeaderValue::from_static("application/json")).body(Bytes::new())?;
    let response = client.call(request).await?;
    if response.status() != StatusCode::OK {
        return Err(format!("the API server answers {}", response.status()).into());
    }
    Ok(read_json::<ServiceList>(response.body())?.items.into_iter().next())
}
