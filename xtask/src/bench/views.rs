//! Views of the results on the page, one for each benchmark: a question, charts, and a table of at most ten rows. All
//! are cells of the results; the site has all tables.

use super::{Selection, chart::Kind};

/// A benchmark on the page.
pub(super) struct View {
    pub(super) question: &'static str,
    /// How to read it.
    pub(super) note: &'static str,
    pub(super) charts: &'static [ChartView],
    pub(super) table: Option<TableView>,
}

/// A chart of the page.
pub(super) struct ChartView {
    /// Part of its file's name.
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    /// The quantity with its unit.
    pub(super) quantity: &'static str,
    pub(super) kind: Kind,
    /// Groups of bars, or places on the horizontal axis; a series is a column.
    pub(super) grid: Grid,
}

/// A table of the page.
pub(super) struct TableView {
    /// Heading of the names of the rows.
    pub(super) corner: &'static str,
    pub(super) grid: Grid,
}

/// Names of rows and columns, and the place of a cell in the results: title of the table, row, column.
pub(super) struct Grid {
    pub(super) rows: &'static [&'static str],
    pub(super) columns: &'static [&'static str],
    pub(super) at: fn(&str, &str) -> [String; 3],
}

const PROXIES: &[&str] = &["cproxy", "kube-proxy, iptables", "kube-proxy, nftables"];
const WITH_DIRECT: &[&str] = &["direct", "cproxy", "kube-proxy, iptables", "kube-proxy, nftables"];
const WITH_IPVS: &[&str] = &["cproxy", "kube-proxy, iptables", "kube-proxy, nftables", "kube-proxy, IPVS"];
const ALL: &[&str] = &["direct", "cproxy", "kube-proxy, iptables", "kube-proxy, nftables", "kube-proxy, IPVS"];
const FEW_AND_MANY: &[&str] = &["10 Services", "5,000 Services"];

const RATIO_OF_TIMES: &str = "ratio to a direct connection, median (lower is better)";
const RATIO_OF_RATES: &str = "ratio to a direct connection, median (higher is better)";

const WRK: &str = "wrk, 2,000 connections, Connection: close";
const REQUEST: &str = "one HTTP request after the other, each with its connection";
const IDLE: &str = "connections to 3 endpoints, idle for 8 s, conntrack's timeout 3 s";
const CHANGE: &str = "From an EndpointSlice's change on the API server to the first connect() that follows it, ms";

impl Selection {
    /// Its view on the page.
    pub(super) fn view(self) -> View {
        match self {
            Self::Connect => CONNECT,
            Self::Request => REQUESTS,
            Self::Wrk => THROUGHPUT,
            Self::Guest => GUEST,
            Self::SmallGuest => SMALL_GUEST,
            Self::Redis => REDIS,
            Self::RedisCluster => REDIS_CLUSTER,
            Self::Rolling => ROLLING,
            Self::Udp => UDP,
            Self::Datapath => DATAPATH,
            Self::Agent => AGENT,
            Self::Start => START,
            Self::Propagation => PROPAGATION,
            Self::Fanout => FANOUT,
            Self::Relay => RELAY,
            Self::Pods => PODS,
            Self::Policy => POLICY,
            Self::Receive => RECEIVE,
            Self::Sockets => SOCKETS,
            Self::Balance => BALANCE,
            Self::All | Self::Docs => View { question: "", note: "", charts: &[], table: None },
        }
    }
}

/// As the results name a peer.
fn raw(peer: &str) -> String {
    let name = peer.strip_prefix("kube-proxy, ").unwrap_or(peer);
    if name == "IPVS" { "ipvs".to_owned() } else { name.to_owned() }
}

/// The title of a table about that many Services, whose name is `5,000` or begins with `5,000 Services`.
fn services(title: &str, row: &str) -> String {
    format!("{title}, {} Services", row.split(' ').next().unwrap_or(row).replace(',', ""))
}

/// The second part of a name such as `5,000 Services, p50, us`.
fn part(row: &str) -> &str {
    row.split_once("Services, ").map_or(row, |(_, part)| part)
}

const CONNECT: View = View {
    question: "How much longer does connect() take to a ClusterIP than to the pod's own address?",
    note: "The direct connection pays for cproxy's hooks as well; [datapath](#datapath) compares with a machine that \
           has none. A dash: kube-proxy was not measured with so many Services.",
    charts: &[ChartView {
        name: "p50",
        title: "Time of connect() to a ClusterIP",
        quantity: RATIO_OF_TIMES,
        kind: Kind::Lines("Services in the cluster"),
        grid: Grid {
            rows: &["10", "100", "1,000", "5,000", "20,000", "50,000"],
            columns: PROXIES,
            at: |row, column| [services("connect(2)", row), "connect(2), p50, us > to direct".into(), raw(column)],
        },
    }],
    table: Some(TableView {
        corner: "",
        grid: Grid {
            rows: &[
                "10 Services, connect(2), p50, us",
                "10 Services, p99, us",
                "5,000 Services, connect(2), p50, us",
                "5,000 Services, p90, us",
                "5,000 Services, p99, us",
                "5,000 Services, socket(), connect(), close(), p50, us",
                "5,000 Services, connect(2), the first of a round, us",
                "50,000 Services, connect(2), p50, us",
                "50,000 Services, p99, us",
            ],
            columns: WITH_DIRECT,
            at: |row, column| [services("connect(2)", row), part(row).into(), raw(column)],
        },
    }),
};

const REQUESTS: View = View {
    question: "How much longer does a short HTTP request take, connect() included?",
    note: "",
    charts: &[ChartView {
        name: "p50",
        title: "Time of a short HTTP request through a ClusterIP",
        quantity: RATIO_OF_TIMES,
        kind: Kind::Lines("Services in the cluster"),
        grid: Grid {
            rows: &["10", "5,000", "20,000"],
            columns: PROXIES,
            at: |row, column| [services(REQUEST, row), "whole request, p50, us > to direct".into(), raw(column)],
        },
    }],
    table: Some(TableView {
        corner: "",
        grid: Grid {
            rows: &[
                "10 Services, whole request, p50, us",
                "10 Services, p90, us",
                "10 Services, p99, us",
                "5,000 Services, whole request, p50, us",
                "5,000 Services, p90, us",
                "5,000 Services, p99, us",
            ],
            columns: WITH_DIRECT,
            at: |row, column| [services(REQUEST, row), part(row).into(), raw(column)],
        },
    }),
};

const THROUGHPUT: View = View {
    question: "How many short HTTP connections does a machine serve in a second?",
    note: "2,000 clients on the CPUs of the server; latencies do not include connect().",
    charts: &[ChartView {
        name: "throughput",
        title: "Short HTTP connections in a second through a ClusterIP",
        quantity: RATIO_OF_RATES,
        kind: Kind::Lines("Services in the cluster"),
        grid: Grid {
            rows: &["10", "100", "1,000", "5,000", "20,000"],
            columns: PROXIES,
            at: |row, column| [services(WRK, row), "requests/s > to direct".into(), raw(column)],
        },
    }],
    table: Some(TableView {
        corner: "",
        grid: Grid {
            rows: &[
                "10 Services, requests/s",
                "10 Services, latency p50, ms",
                "10 Services, p99, ms",
                "5,000 Services, requests/s",
                "5,000 Services, latency p50, ms",
                "5,000 Services, p90, ms",
                "5,000 Services, p99, ms",
                "5,000 Services, p99.9, ms",
            ],
            columns: WITH_DIRECT,
            at: |row, column| [services(WRK, row), part(row).into(), raw(column)],
        },
    }),
};

const GUEST: View = View {
    question: "How does IPVS compare?",
    note: "One virtual machine with an emulated processor: times are executed instructions at 1,000 MIPS, so ratios \
           are amounts of work. Connections that stay idle longer than conntrack remembers them survive with cproxy.",
    charts: &[
        ChartView {
            name: "connect",
            title: "Instructions of connect() to a ClusterIP",
            quantity: RATIO_OF_TIMES,
            kind: Kind::Bars,
            grid: Grid {
                rows: FEW_AND_MANY,
                columns: WITH_IPVS,
                at: |row, column| [services("connect(2)", row), "connect(2), p50, us > to direct".into(), raw(column)],
            },
        },
        ChartView {
            name: "throughput",
            title: "Short HTTP connections in a second, by instructions",
            quantity: RATIO_OF_RATES,
            kind: Kind::Bars,
            grid: Grid {
                rows: FEW_AND_MANY,
                columns: WITH_IPVS,
                at: |row, column| [services(WRK, row), "requests/s > to direct".into(), raw(column)],
            },
        },
    ],
    table: Some(TableView {
        corner: "",
        grid: Grid {
            rows: &[
                "10 Services, connect(2), p50, us",
                "10 Services, requests/s",
                "10 Services, TCP, Gbit/s",
                "10 Services, idle connections that survive",
                "5,000 Services, connect(2), p50, us",
                "5,000 Services, whole request, p50, us",
                "5,000 Services, requests/s",
                "5,000 Services, TCP, Gbit/s",
            ],
            columns: ALL,
            at: |row, column| {
                let title = match part(row) {
                    "requests/s" => services(WRK, row),
                    "whole request, p50, us" => services(REQUEST, row),
                    "TCP, Gbit/s" => services("iperf3, one TCP stream", row),
                    "idle connections that survive" => IDLE.into(),
                    _ => services("connect(2)", row),
                };
                let row = if title == IDLE { "alive" } else { part(row) };
                [title, row.into(), raw(column)]
            },
        },
    }),
};

const SMALL: &str = "a guest with half a core and 500 MiB";

const SMALL_GUEST: View = View {
    question: "What is left of a guest with half a core and 500 MiB?",
    note: "Times are executed instructions at 500 MIPS, half a core's. `direct` has no proxy: its distance from the \
           others is what they cost. Whole requests have two speeds, 20 us apart, also without a proxy; which one a \
           guest has is chance.",
    charts: &[ChartView {
        name: "memory",
        title: "Memory left in a guest of 500 MiB",
        quantity: "memory still available (MiB, higher is better)",
        kind: Kind::Bars,
        grid: Grid {
            rows: FEW_AND_MANY,
            columns: ALL,
            at: |row, column| [services(SMALL, row), "memory still available, MiB".into(), raw(column)],
        },
    }],
    table: Some(TableView {
        corner: "",
        grid: Grid {
            rows: &[
                "10 Services, connect(2), p50, us",
                "10 Services, whole HTTP request, p50, us",
                "10 Services, wrk, 2,000 connections, requests/s",
                "10 Services, iperf3, Gbit/s",
                "10 Services, memory still available, MiB",
                "5,000 Services, connect(2), p50, us",
                "5,000 Services, whole HTTP request, p50, us",
                "5,000 Services, wrk, 2,000 connections, requests/s",
                "5,000 Services, iperf3, Gbit/s",
                "5,000 Services, memory still available, MiB",
            ],
            columns: ALL,
            at: |row, column| [services(SMALL, row), part(row).into(), raw(column)],
        },
    }),
};

/// Names of rows and the kinds of connections in the titles of redis' tables.
const REDIS_ROWS: &[&str] = &[
    "10 Services, connections that stay",
    "10 Services, a connection for each request",
    "5,000 Services, connections that stay",
    "5,000 Services, a connection for each request",
];

const REDIS: View = View {
    question: "How many requests does redis answer in a second?",
    note: "Latencies do not include connect().",
    charts: &[ChartView {
        name: "throughput",
        title: "redis: requests in a second through a ClusterIP",
        quantity: RATIO_OF_RATES,
        kind: Kind::Bars,
        grid: Grid {
            rows: REDIS_ROWS,
            columns: PROXIES,
            at: |row, column| redis("redis-benchmark", row, column, true),
        },
    }],
    table: Some(TableView {
        corner: "requests/s",
        grid: Grid {
            rows: REDIS_ROWS,
            columns: WITH_DIRECT,
            at: |row, column| redis("redis-benchmark", row, column, false),
        },
    }),
};

const REDIS_CLUSTER: View = View {
    question: "How many requests does a redis cluster of three shards answer in a second?",
    note: "",
    charts: &[ChartView {
        name: "throughput",
        title: "redis cluster: requests in a second through ClusterIPs",
        quantity: RATIO_OF_RATES,
        kind: Kind::Bars,
        grid: Grid {
            rows: REDIS_ROWS,
            columns: PROXIES,
            at: |row, column| redis("redis-benchmark --cluster", row, column, true),
        },
    }],
    table: Some(TableView {
        corner: "requests/s",
        grid: Grid {
            rows: REDIS_ROWS,
            columns: WITH_DIRECT,
            at: |row, column| redis("redis-benchmark --cluster", row, column, false),
        },
    }),
};

fn redis(program: &str, row: &str, column: &str, is_ratio: bool) -> [String; 3] {
    let title = services(&format!("{program}, {}", part(row)), row);
    [title, if is_ratio { "requests/s > to direct" } else { "requests/s" }.into(), raw(column)]
}

const ROLLING: View = View {
    question: "How many requests fail while the pods of a Deployment are replaced?",
    note: "Three pods are replaced one after the other, five times, while a client makes one request after the other, \
           each on its own connection. A pod without a preStop hook ends at once; with one, after 2 s.",
    charts: &[ChartView {
        name: "refused",
        title: "Requests refused during five rolling updates",
        quantity: "requests (lower is better)",
        kind: Kind::Bars,
        grid: Grid {
            rows: &[
                "10 Services, pods end at once",
                "10 Services, pods end after 2 s",
                "5,000 Services, pods end at once",
                "5,000 Services, pods end after 2 s",
            ],
            columns: PROXIES,
            at: |row, column| rolling(row, "refused", column),
        },
    }],
    table: Some(TableView {
        corner: "",
        grid: Grid {
            rows: &[
                "10 Services, pods end at once: answered",
                "10 Services, pods end at once: refused",
                "10 Services, pods end after 2 s: answered",
                "10 Services, pods end after 2 s: refused",
                "5,000 Services, pods end at once: answered",
                "5,000 Services, pods end at once: refused",
                "5,000 Services, pods end after 2 s: answered",
                "5,000 Services, pods end after 2 s: refused",
            ],
            columns: PROXIES,
            at: |row, column| {
                let (case, figure) = row.split_once(": ").unwrap_or((row, ""));
                rolling(case, figure, column)
            },
        },
    }),
};

fn rolling(case: &str, figure: &str, column: &str) -> [String; 3] {
    [
        format!("requests during rolling updates, {}", case.replace(',', "").replace("Services ", "Services, ")),
        figure.into(),
        raw(column),
    ]
}

const UDP: View = View {
    question: "How many DNS queries in a second, and how fast is one TCP stream?",
    note: "",
    charts: &[ChartView {
        name: "throughput",
        title: "DNS queries and one TCP stream through a ClusterIP",
        quantity: RATIO_OF_RATES,
        kind: Kind::Bars,
        grid: Grid {
            rows: &[
                "10 Services, DNS queries/s",
                "5,000 Services, DNS queries/s",
                "10 Services, TCP, Gbit/s",
                "5,000 Services, TCP, Gbit/s",
            ],
            columns: PROXIES,
            at: |row, column| {
                let [title, figure, column] = udp(row, column);
                [title, format!("{figure} > to direct"), column]
            },
        },
    }],
    table: Some(TableView {
        corner: "",
        grid: Grid {
            rows: &[
                "10 Services, DNS queries/s",
                "10 Services, mean latency, us",
                "10 Services, TCP, Gbit/s",
                "5,000 Services, DNS queries/s",
                "5,000 Services, mean latency, us",
                "5,000 Services, TCP, Gbit/s",
            ],
            columns: WITH_DIRECT,
            at: udp,
        },
    }),
};

fn udp(row: &str, column: &str) -> [String; 3] {
    let title = if part(row).starts_with("TCP") { "iperf3, one TCP stream" } else { "dnsperf, UDP" };
    [services(title, row), part(row).trim_start_matches("DNS ").into(), raw(column)]
}

/// Titles of the tables of whole calls.
const CALLS: &[&str] = &[
    "TCP connect(), IPv4",
    "TCP connect(), IPv6",
    "TCP socket(), connect(), close(), IPv4",
    "TCP socket(), connect(), close(), IPv6",
    "UDP sendto(), again on one socket, IPv4",
    "UDP sendto(), again on one socket, IPv6",
];

const DATAPATH: View = View {
    question: "How much longer do calls take than on a machine without cproxy?",
    note: "[Profile](profile.md) says where the time goes.",
    charts: &[ChartView {
        name: "calls",
        title: "What cproxy's programs add to a call",
        quantity: "extra time over a call with nothing attached (ns, lower is better)",
        kind: Kind::Bars,
        grid: Grid {
            rows: CALLS,
            columns: &["to a ClusterIP", "to a pod"],
            at: |row, column| calls(row, column, "difference, ns"),
        },
    }],
    table: Some(TableView {
        corner: "",
        grid: Grid {
            rows: CALLS,
            columns: &["nothing attached, ns", "to a ClusterIP, ns", "to a ClusterIP, ratio", "to a pod, ratio"],
            at: |row, column| {
                let (of, figure) = column.split_once(", ").unwrap_or((column, ""));
                calls(row, of, figure)
            },
        },
    }),
};

fn calls(row: &str, of: &str, figure: &str) -> [String; 3] {
    let pods = if row.starts_with("UDP") { "to a pod" } else { "to pods" };
    let of = match of {
        "to a ClusterIP" => "to the ClusterIP".into(),
        "to a pod" => pods.into(),
        _ => format!("{pods}, nothing attached"),
    };
    [row.into(), of, figure.into()]
}

/// Rows of the charts of agents.
const SHAPES: &[&str] =
    &["100 Services of 10 endpoints", "5,000 Services of 10 endpoints", "10,000 Services of 25 endpoints"];

fn agents(shape: &str, figure: &str, column: &str) -> [String; 3] {
    let numbers = shape.replace(',', "");
    let words: Vec<_> = numbers.split(' ').collect();
    let (count, endpoints) = (words.first().copied().unwrap_or_default(), words.get(3).copied().unwrap_or_default());
    let title = format!("{count} Services with {endpoints} endpoints each, in {count} slices");
    [title, figure.into(), column.into()]
}

const AGENT: View = View {
    question: "What do agents cost: memory, CPU time, start, and the time until a change is in force?",
    note: "All follow the same API server. kube-proxy was not measured with 10,000 Services.",
    charts: &[
        ChartView {
            name: "memory",
            title: "Memory of the agent",
            quantity: "resident memory at rest (MiB, lower is better)",
            kind: Kind::Bars,
            grid: Grid {
                rows: SHAPES,
                columns: PROXIES,
                at: |row, column| agents(row, "resident memory at rest, MiB", column),
            },
        },
        ChartView {
            name: "start",
            title: "Start of the agent",
            quantity: "time from start to ready (s, lower is better)",
            kind: Kind::Bars,
            grid: Grid { rows: SHAPES, columns: PROXIES, at: |row, column| agents(row, "start to ready, s", column) },
        },
    ],
    table: Some(TableView {
        corner: "5,000 Services of 10 endpoints",
        grid: Grid {
            rows: &[
                "on disk, MiB",
                "start to ready, s",
                "CPU time until it is at rest, s",
                "resident memory at rest, MiB",
                "of which anonymous, MiB",
                "peak resident memory until then, MiB",
                "kernel memory of its maps, KiB",
                "one change, until connections follow, ms",
                "CPU time of one change, ms",
                "wake-ups a minute, at rest",
            ],
            columns: PROXIES,
            at: |row, column| {
                let figure = match row {
                    "CPU time of one change, ms" => "one change, until connections follow, ms > CPU, ms",
                    "wake-ups a minute, at rest" => "at rest: wake-ups a minute",
                    row => row,
                };
                agents("5,000 Services of 10", figure, column)
            },
        },
    }),
};

const PARTS: &[&str] = &[
    "from the start to ready",
    "input and the machine's state",
    "programs verified and attached",
    "maps opened",
    "lists complete",
    "table written",
];

/// The median of a part, from a source of the objects.
fn starts(part: &str, services: &str, source: &str) -> [String; 3] {
    let title = format!("{} Services with 10 endpoints each, {source}, ms", services.replace(',', ""));
    [title, part.into(), "p50".into()]
}

const START: View = View {
    question: "How long does the agent take from its start to a complete table?",
    note: "On a machine without state of an earlier run. The parts follow each other; CPU time counts the child that \
           installs the programs.",
    charts: &[ChartView {
        name: "ready",
        title: "The agent's start with 5,000 Services, part by part",
        quantity: "median time (ms, lower is better)",
        kind: Kind::Bars,
        grid: Grid {
            rows: PARTS,
            columns: &["manifests", "API server", "relay"],
            at: |row, column| starts(row, "5,000", column),
        },
    }],
    table: Some(TableView {
        corner: "median, ms",
        grid: Grid {
            rows: &[
                "from the start to ready",
                "input and the machine's state",
                "programs verified and attached",
                "maps opened",
                "lists complete",
                "table written",
                "CPU time",
            ],
            columns: &[
                "100 Services, manifests",
                "100, API server",
                "100, relay",
                "5,000 Services, manifests",
                "5,000, API server",
                "5,000, relay",
            ],
            at: |row, column| {
                let (services, source) = column.split_once(", ").unwrap_or((column, ""));
                starts(row, services.trim_end_matches(" Services"), source)
            },
        },
    }),
};

const CHANGES: &[&str] =
    &["since the change was sent", "since the API server answered", "since another client's watch reported it"];

const PROPAGATION: View = View {
    question: "How long does a changed EndpointSlice take until new connections follow it?",
    note: "",
    charts: &[ChartView {
        name: "changes",
        title: "From a changed EndpointSlice to connections that follow it",
        quantity: "time (ms, lower is better)",
        kind: Kind::Bars,
        grid: Grid {
            rows: CHANGES,
            columns: &["median", "99th percentile"],
            at: |row, column| [CHANGE.into(), row.into(), if column == "median" { "p50" } else { "p99" }.into()],
        },
    }],
    table: Some(TableView {
        corner: "ms",
        grid: Grid {
            rows: CHANGES,
            columns: &["p50", "p90", "p99", "max"],
            at: |row, column| [CHANGE.into(), row.into(), column.into()],
        },
    }),
};

const FLEETS: &[&str] = &["1 agent", "10 agents", "100 agents"];
const FLEET_PEERS: &[&str] = &["cproxy", "kube-proxy, nftables"];

fn fleets(row: &str, figure: &str, agents: &str, peer: &str) -> [String; 3] {
    let count = agents.split(' ').next().unwrap_or_default();
    let title = "Clients of one API server with 1000 Services of 10 endpoints each";
    let figure = if figure.is_empty() { row } else { figure };
    [title.into(), figure.into(), format!("{count} {peer}")]
}

const FANOUT: View = View {
    question: "What does each further agent cost the API server?",
    note: "kube-proxy was measured with up to 10 instances. All share two CPUs with the API server. After a crash with \
           5,000 Services an agent may need whole lists, as in its start.",
    charts: &[
        ChartView {
            name: "start-cpu",
            title: "Cost of an agent's start for the API server",
            quantity: "CPU time of the API server for each agent (ms, lower is better)",
            kind: Kind::Bars,
            grid: Grid {
                rows: FLEETS,
                columns: FLEET_PEERS,
                at: |row, column| fleets(row, "API server's CPU for each, ms", row, column),
            },
        },
        ChartView {
            name: "change-time",
            title: "One changed EndpointSlice, many agents",
            quantity: "time until connections of all follow it (ms, lower is better)",
            kind: Kind::Bars,
            grid: Grid {
                rows: FLEETS,
                columns: FLEET_PEERS,
                at: |row, column| fleets(row, "one change: first follows, ms > all follow, ms", row, column),
            },
        },
    ],
    table: Some(TableView {
        corner: "1,000 Services of 10 endpoints",
        grid: Grid {
            rows: &[
                "all started at once: all ready, s",
                "API server's CPU for each, ms",
                "CPU of each, ms",
                "sent to each, KiB",
                "connections and TLS handshakes of each",
                "at rest: API server's live memory for each, KiB",
                "resident memory of each, MiB",
                "one change: all follow, ms",
                "sent to each since the crash, KiB",
            ],
            columns: &["1 cproxy", "1 kube-proxy, nftables", "10 cproxy", "10 kube-proxy, nftables", "100 cproxy"],
            at: |row, column| {
                let figure = match row {
                    "all started at once: all ready, s" => "all started at once: first ready, s > all of them, s",
                    "one change: all follow, ms" => "one change: first follows, ms > all follow, ms",
                    row => row,
                };
                let (agents, peer) = column.split_once(' ').unwrap_or((column, ""));
                fleets(row, figure, agents, peer)
            },
        },
    }),
};

const PODS: View = View {
    question: "What would it cost the API server if every agent watched all Pods?",
    note: "This is why agents get the peers of policies from a relay: each watch of all Pods costs the API server this \
           for each event, and sends each agent 9 KB.",
    charts: &[ChartView {
        name: "events",
        title: "Watches of all Pods, at 100 changes a second",
        quantity: "CPU time of the API server for each event (us, lower is better)",
        kind: Kind::Bars,
        grid: Grid {
            rows: &["11 watches", "33 watches", "100 watches"],
            columns: &["API server"],
            at: |row, _| pods(row, "us for each event"),
        },
    }],
    table: Some(TableView {
        corner: "one list of 100,000 Pods",
        grid: Grid {
            rows: &["no compression, dropped", "gzip, dropped", "gzip, decoded as by the relay"],
            columns: &["MB", "API server's CPU s", "client's CPU s", "seconds"],
            at: |row, column| ["One list of 100000 Pods in protobuf".into(), row.into(), column.into()],
        },
    }),
};

fn pods(row: &str, column: &str) -> [String; 3] {
    let count = row.split(' ').next().unwrap_or_default();
    ["Watches of all Pods at 100 changes a second".into(), count.into(), column.into()]
}

const POLICY: View = View {
    question: "What does a network policy cost the calls of a pod, beside the kernel's packet filters?",
    note: "The baseline is a pod with cproxy's programs for Services and no policy. kube-network-policies judges the \
           first packet of each connection in a process.",
    charts: &[ChartView {
        name: "connect",
        title: "Time of connect() in a pod with a network policy",
        quantity: "ratio to a pod without a policy, median (lower is better)",
        kind: Kind::Lines("addresses in the policy"),
        grid: Grid {
            rows: &["10", "1,000", "10,000"],
            columns: &["cproxy", "nftables, set", "iptables, ipset", "iptables, rules", "kube-network-policies"],
            at: |row, column| {
                let subject = format!("{column}, {}", row.replace(',', ""));
                ["TCP connections".into(), subject, "connect(), p50, us > ratio".into()]
            },
        },
    }],
    table: Some(TableView {
        corner: "ratio to a pod without a policy",
        grid: Grid {
            rows: &[
                "cproxy, not isolated",
                "cproxy, 10",
                "cproxy, 10000",
                "cproxy, ipBlocks, 10000",
                "nftables, set, 10000",
                "iptables, ipset, 10000",
                "iptables, rules, 10",
                "iptables, rules, 10000",
                "kube-network-policies, 10000",
            ],
            columns: &["connect()", "connect() to the pod", "datagram and answer", "stream"],
            at: |row, column| {
                let (table, figure) = match column {
                    "connect()" => ("TCP connections", "connect(), p50, us"),
                    "connect() to the pod" => ("TCP connections to the pod", "connect() to the pod, p50, us"),
                    "stream" => ("Datagrams and streams", "established stream, us for each MiB"),
                    _ => ("Datagrams and streams", "datagram sent and answered, p50, us"),
                };
                [table.into(), row.into(), format!("{figure} > ratio")]
            },
        },
    }),
};

const RECEIVE_COLUMNS: [(&str, &str); 3] = [
    ("connect(), us", "connect(), p50, us"),
    ("request and answer, us", "request and answer, p50, us"),
    ("stream, us for each MiB", "established stream, us for each MiB"),
];

/// A figure of calls from outside.
fn received(row: &str, name: &str, is_ratio: bool) -> [String; 3] {
    let (_, figure) = RECEIVE_COLUMNS.into_iter().find(|(of, _)| *of == name).unwrap_or(("", ""));
    let figure = if is_ratio { format!("{figure} > ratio") } else { figure.into() };
    ["Calls to the pod from outside".into(), row.into(), figure]
}

const RECEIVE: View = View {
    question: "What does it cost to receive calls to the address of a load balancer?",
    note: "A connection pays once, its requests and streams nothing.",
    charts: &[ChartView {
        name: "connect",
        title: "Time of connect() from outside",
        quantity: "ratio to a pod whose agent does not receive, median (lower is better)",
        kind: Kind::Bars,
        grid: Grid {
            rows: &["to the pod", "to the address, equal ports", "to the address, port 80 to 8080"],
            columns: &["cproxy"],
            at: |row, _| received(&format!("--receive, {row}"), "connect(), us", true),
        },
    }],
    table: Some(TableView {
        corner: "",
        grid: Grid {
            rows: &[
                "without --receive",
                "--receive, to the pod",
                "--receive, to the address, equal ports",
                "--receive, to the address, port 80 to 8080",
            ],
            columns: &["connect(), us", "request and answer, us", "stream, us for each MiB"],
            at: |row, column| received(row, column, false),
        },
    }),
};

/// Servers of the clients.
const SERVERS: &[&str] = &["relay", "API server"];

/// A figure of changes, by server, number of clients and rate.
fn changes(server: &str, row: &str, figure: &str) -> [String; 3] {
    ["Changes".into(), format!("{server}, {}", row.replace(',', "").replace("clients ", "clients, ")), figure.into()]
}

const RELAY: View = View {
    question: "What do thousands of agents cost one relay, and what would they cost the API server?",
    note: "5,000 Services of 10 endpoints. All processes share two CPUs, so that 10 changes a second to 10,000 clients \
           fill both; times include those of the program that stands for the clients. `Own` is a client's with a \
           process of its own. [Relay](relay.md#how-many) has more, and how many replicas that takes.",
    charts: &[
        ChartView {
            name: "memory",
            title: "Memory of what serves the agents, at rest",
            quantity: "resident memory (MiB, lower is better)",
            kind: Kind::Bars,
            grid: Grid {
                rows: &["2,000 clients", "10,000 clients"],
                columns: SERVERS,
                at: |row, column| {
                    let row = format!("{column}, {}", row.replace(',', ""));
                    ["Memory at rest".into(), row, "resident, MiB".into()]
                },
            },
        },
        ChartView {
            name: "changes",
            title: "From a changed EndpointSlice to the client",
            quantity: "99th percentile (ms, lower is better)",
            kind: Kind::Bars,
            grid: Grid {
                rows: &["2,000 clients, 1/s", "2,000 clients, 10/s", "10,000 clients, 1/s", "10,000 clients, 10/s"],
                columns: SERVERS,
                at: |row, column| changes(column, row, "p99, ms"),
            },
        },
    ],
    table: Some(TableView {
        corner: "changes of EndpointSlices",
        grid: Grid {
            rows: &[
                "relay: 2,000 clients, 1/s",
                "relay: 2,000 clients, 10/s",
                "relay: 2,000 clients, 100/s",
                "relay: 10,000 clients, 1/s",
                "relay: 10,000 clients, 10/s",
                "relay: 10,000 clients, 100/s",
                "API server: 2,000 clients, 1/s",
                "API server: 2,000 clients, 10/s",
                "API server: 2,000 clients, 100/s",
            ],
            columns: &["p50, ms", "p99, ms", "own p99, ms", "its CPU", "events/s"],
            at: |row, column| {
                let (server, row) = row.split_once(": ").unwrap_or((row, ""));
                let figure = match column {
                    "own p99, ms" => "own p99",
                    "its CPU" => "server's CPU",
                    column => column,
                };
                changes(server, row, figure)
            },
        },
    }),
};

/// Scenes in which endpoints leave.
const LEAVING: &[&str] = &["TCP endpoints leave", "UDP endpoints leave"];

/// A figure of the agent while endpoints leave; `beside` names what else is open.
fn leaving(row: &str, beside: &str, figure: &str) -> [String; 3] {
    let row = if beside == "few" { row.to_owned() } else { format!("{row}, beside 19900 open descriptors") };
    ["CPU time of the agent while endpoints leave".into(), row, figure.into()]
}

const SOCKETS: View = View {
    question: "What does the agent's search for stale sockets cost?",
    note: "Ten times a second an endpoint leaves and another comes. By default the agent closes sockets of UDP alone: \
           what UDP endpoints cost more than TCP endpoints is the search.",
    charts: &[
        ChartView {
            name: "leaving",
            title: "The agent while ten endpoints a second leave",
            quantity: "share of a CPU (%, lower is better)",
            kind: Kind::Bars,
            grid: Grid {
                rows: LEAVING,
                columns: &["few descriptors", "19,900 descriptors"],
                at: |row, column| leaving(row, column.trim_end_matches(" descriptors"), "% of a CPU"),
            },
        },
        ChartView {
            name: "start",
            title: "Start of the agent beside connected UDP sockets",
            quantity: "CPU time until all are looked at (ms, lower is better)",
            kind: Kind::Bars,
            grid: Grid {
                rows: &["no sockets", "95,000 sockets"],
                columns: &["cproxy"],
                at: |row, _| {
                    let title = "The agent started again, beside connected UDP sockets";
                    let figure = "CPU time until its first pass has ended, ms";
                    [title.into(), figure.into(), row.replace(',', "")]
                },
            },
        },
    ],
    table: Some(TableView {
        corner: "",
        grid: Grid {
            rows: LEAVING,
            columns: &[
                "few: % of a CPU",
                "few: passes",
                "19,900 descriptors: % of a CPU",
                "19,900 descriptors: passes",
            ],
            at: |row, column| {
                let (beside, figure) = column.split_once(": ").unwrap_or((column, ""));
                leaving(row, beside, figure)
            },
        },
    }),
};

const BALANCE: View = View {
    question: "How evenly are connections spread over endpoints?",
    note: "`cproxy, round robin` is `--balance round-robin`; the others choose at random.",
    charts: &[ChartView {
        name: "of-40",
        title: "40 long-lived connections: the endpoint with the most",
        quantity: "its connections over the mean of all endpoints (1 is even)",
        kind: Kind::Bars,
        grid: Grid {
            rows: &["2 endpoints", "3 endpoints", "10 endpoints"],
            columns: &["cproxy", "cproxy, round robin", "kube-proxy, iptables", "kube-proxy, nftables"],
            at: |row, column| balance("40", row, column),
        },
    }],
    table: Some(TableView {
        corner: "the endpoint with the most, over the mean",
        grid: Grid {
            rows: &[
                "40 connections, 2 endpoints",
                "40 connections, 3 endpoints",
                "40 connections, 10 endpoints",
                "400 connections, 2 endpoints",
                "400 connections, 3 endpoints",
                "400 connections, 10 endpoints",
            ],
            columns: &["cproxy", "cproxy, round robin", "kube-proxy, iptables", "kube-proxy, nftables"],
            at: |row, column| {
                let (connections, endpoints) = row.split_once(" connections, ").unwrap_or((row, ""));
                balance(connections, endpoints, column)
            },
        },
    }),
};

fn balance(connections: &str, endpoints: &str, column: &str) -> [String; 3] {
    let endpoints = endpoints.split(' ').next().unwrap_or_default();
    let title = format!("{connections} connections to {endpoints} backends, 10 Services");
    [title, "most loaded backend, divided by the mean".into(), raw(column)]
}
