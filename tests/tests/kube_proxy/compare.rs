//! Comparison of every frontend of either proxy.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    io,
    net::{IpAddr, SocketAddr, TcpStream},
};

use serde_json::Value;

use crate::{
    api::{full_name, kind, service_of},
    cluster::{NODE_IPS, View},
    declared::{self, TakenClusterIps, Undefined},
    frontends::{Frontend, Outcome, Row},
    walk,
};

/// A port that no Service has.
const UNUSED_PORT: u16 = 9;

/// Counts of comparisons, for the report and to ensure that there were any.
#[derive(Default)]
pub(crate) struct Tally {
    /// Number of outcomes of each kind by source of the frontend.
    outcomes: BTreeMap<String, usize>,
    /// Number of comparisons that do not count because kube-proxy's result is undefined.
    undefined: usize,
    /// Number of comparisons on ClusterIPs that another Service claims as external addresses.
    taken: usize,
}

impl Tally {
    fn count(&mut self, row: &Row) {
        let outcome = match &row.outcome {
            Outcome::Refuse => "refuse",
            Outcome::Drop => "drop",
            Outcome::Forward { affinity: None, .. } => "forward",
            Outcome::Forward { affinity: Some(_), .. } => "forward with affinity",
        };
        *self.outcomes.entry(format!("{} {outcome}", row.source)).or_default() += 1;
    }

    /// Ends the test if any expected comparison is missing.
    pub(crate) fn check(&self) {
        let Self { outcomes, undefined, taken } = self;
        eprintln!("compared: {outcomes:?}; undefined in kube-proxy: {undefined}; on claimed ClusterIPs: {taken}");
        for word in ["ClusterIP", "ExternalIP", "LoadBalancerIP", "NodePort", "refuse", "drop", "forward", "affinity"] {
            assert!(self.outcomes.keys().any(|outcome| outcome.contains(word)), "never compared: {word}");
        }
        let all = self.outcomes.values().sum::<usize>();
        assert!(self.undefined * 10 < all, "{} comparisons did not count, only {all} did", self.undefined);
    }
}

/// Description of the differences between the proxies; empty if there are none.
pub(crate) fn differences(view: &View, tally: &mut Tally) -> String {
    let (undefined, taken) = (Undefined::find(&view.objects), TakenClusterIps::find(&view.objects));
    let kube_proxy =
        walk::frontends(&view.kube_proxy).into_iter().filter(|frontend| !declared::is_out_of_reach(frontend));
    let kube_proxy = kube_proxy.map(|frontend| (frontend.clone(), walk::outcome(&view.kube_proxy, &frontend)));
    let kube_proxy = kube_proxy.collect::<BTreeMap<_, _>>();
    let mut text = String::new();
    for frontend in kube_proxy.keys().chain(view.in_kernel.keys()).chain(view.resolved.keys()).collect::<BTreeSet<_>>()
    {
        let wanted = kube_proxy.get(frontend);
        let found = [view.in_kernel.get(frontend), view.resolved.get(frontend)];
        let is_same = |row: &Option<&Row>| match (wanted, row) {
            (Some(Some(outcome)), Some(row)) => row.outcome == *outcome,
            (wanted, row) => wanted.is_none() && row.is_none(),
        };
        let is_undefined = |row: &&Row| wanted.is_some() && undefined.contains(frontend, row);
        if found.iter().all(is_same) {
            found.iter().flatten().for_each(|row| tally.count(row));
        } else if found[0].is_some_and(|row| is_undefined(&row)) && found[1].is_some_and(|row| is_undefined(&row)) {
            tally.undefined += 1;
        } else if taken.contains(frontend, found) {
            tally.taken += 1;
        } else {
            describe(&mut text, view, frontend, wanted, found);
        }
    }
    text + &unknown_ports(view)
}

fn describe(
    text: &mut String,
    view: &View,
    frontend: &Frontend,
    wanted: Option<&Option<Outcome>>,
    found: [Option<&Row>; 2],
) {
    let wanted = match wanted {
        None => "no such frontend".to_owned(),
        Some(None) => "lets it pass".to_owned(),
        Some(Some(outcome)) => outcome.to_string(),
    };
    let row = |row: Option<&Row>| match row {
        None => "no such frontend".to_owned(),
        Some(row) => format!("{} ({} {} {})", row.outcome, row.source, row.service, row.port_name),
    };
    writeln!(text, "{frontend}\n  kube-proxy:     {wanted}").unwrap();
    writeln!(text, "  cproxy:         {}\n  cproxy resolve: {}", row(found[0]), row(found[1])).unwrap();
    for object in related_objects(view, frontend, found) {
        writeln!(text, "  {object}").unwrap();
    }
}

/// Services with the frontend's address or port, or of the rows, their slices, and the node.
fn related_objects<'v>(view: &'v View, frontend: &Frontend, found: [Option<&Row>; 2]) -> Vec<&'v Value> {
    let of_row = |service: &str| found.iter().flatten().any(|row| row.service == service);
    let (address, node_port) =
        (format!("\"{}\"", frontend.address.ip()), format!("\"nodePort\":{}", frontend.address.port()));
    let has_it = |service: &Value| {
        let text = service.to_string();
        text.contains(&address) || text.contains(&node_port)
    };
    let services = view.objects.iter().filter(|object| kind(object) == "Service");
    let services = services.filter(|service| of_row(&full_name(service)) || has_it(service)).map(full_name);
    let services = services.collect::<BTreeSet<_>>();
    let is_concerned = |object: &&Value| match kind(object) {
        "Service" => services.contains(&full_name(object)),
        "EndpointSlice" => services.contains(&service_of(object)),
        _ => true,
    };
    view.objects.iter().filter(is_concerned).collect()
}

/// Checks that exactly the ClusterIPs refuse connections to their unused ports.
fn unknown_ports(view: &View) -> String {
    let cluster_ips = walk::cluster_ips(&view.kube_proxy);
    // The node's own addresses exist, and refuse by themselves.
    let node_ips = NODE_IPS.map(|ip| ip.parse::<IpAddr>().unwrap());
    let others = view.in_kernel.keys().map(|frontend| frontend.address.ip());
    let others = others.filter(|ip| !cluster_ips.contains(ip) && !node_ips.contains(ip));
    let mut text = String::new();
    for ip in cluster_ips.iter().copied().chain(others.collect::<BTreeSet<_>>()) {
        if is_refused(ip) != cluster_ips.contains(&ip) {
            let is = if cluster_ips.contains(&ip) { "a" } else { "no" };
            writeln!(text, "{ip} is {is} ClusterIP for kube-proxy, and cproxy thinks otherwise").unwrap();
        }
    }
    text
}

/// Whether cproxy refuses a connection to an unused port of the address. Without cproxy there is no route.
fn is_refused(ip: IpAddr) -> bool {
    let error = TcpStream::connect(SocketAddr::new(ip, UNUSED_PORT)).expect_err("no server listens");
    error.kind() == io::ErrorKind::ConnectionRefused
}
