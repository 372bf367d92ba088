//! All peers in one virtual machine, since few developer kernels have IPVS. The processor is emulated, and a nanosecond
//! of its clocks is one executed instruction, so its times are instruction counts.

use std::{
    fs, io,
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use cproxy_benches::{
    arena::{Arena, Cluster, Peer, Subject, marker},
    kube_proxy::KubeProxy,
    node,
    paired::Estimate,
    report::{Report, Table},
};
use cproxy_tests::{
    control_plane::{ADDRESS, ControlPlane, PORT},
    guest::{GuestImage, Kernel},
    population::Shape,
    process::cproxy_binary,
    sandbox::Sandbox,
    writer::Writer,
};
use serde_json::{Value, json};

use crate::{PREFIX, Plan, balance, connect, contest, contest::Rounds, redis, request, servers, udp, wrk};

pub(crate) const SERVICES: [u32; 2] = [10, 5_000];
pub(crate) const PEERS: [Peer; 5] = [Peer::Direct, Peer::Cproxy, Peer::Iptables, Peer::Nftables, Peer::Ipvs];
const SUBJECTS: [Subject; 6] = [servers::SINK, servers::WEB, servers::BULK, servers::TWO, servers::THREE, servers::TEN];

/// Number of endpoints of each Service. kube-proxy in mode ipvs starts `ipset` for each endpoint, which takes an hour
/// in this machine for 50,000.
const ENDPOINTS: u32 = 1;

/// A machine that measures.
pub(crate) struct Machine<'a> {
    pub(crate) memory_mib: u32,
    /// Its clocks advance by 2 to the power of this many nanoseconds with each instruction.
    pub(crate) instruction_shift: u8,
    /// Peers that it holds.
    pub(crate) peers: &'a [Peer],
}

/// With room for all peers at once, at 1,000 million instructions a second.
const MACHINE: Machine<'static> = Machine { memory_mib: 4096, instruction_shift: 0, peers: &PEERS };

/// Limit on the run: three kube-proxies and wrk on an emulated processor.
const PATIENCE: Duration = Duration::from_secs(2 * 60 * 60);

const ROUNDS: Rounds = Rounds::of_all(5);
const WRK_ROUNDS: Rounds = Rounds::of_all(3);
/// In a shorter time a proxy whose rules are many may answer none of 2,000 connections.
const WRK_SECONDS: u32 = 3;
const REQUEST_ROUNDS: Rounds = Rounds::of_all(3);
const BULK_ROUNDS: Rounds = Rounds::of_all(3);
const BULK_SECONDS: &str = "1";
const BALANCE_ROUNDS: Rounds = Rounds::of_all(3);

/// Prefix of the result's line on the console.
const RESULT: &str = "result: ";
/// Directory of the guest with the files from the host.
const GIVEN: &str = "/given";

/// Host programs that also run in the guest.
const PROGRAMS: [&str; 8] = ["ip", "nsenter", "nginx", "wrk", "iperf3", "nft", "ipset", "xtables-legacy-multi"];
/// Directory of the iptables extensions.
const EXTENSIONS: &str = "/usr/lib/x86_64-linux-gnu/xtables";

pub(crate) fn run(plan: &Plan) -> Result<Report> {
    let mut report = Report::new("guest");
    report.samples = json!({});
    let mut throughput = Vec::new();
    let peers = if plan.peers.is_empty() { &PEERS } else { plan.peers.as_slice() };
    for services in plan.services(&SERVICES) {
        let result = boot(plan, services, &Machine { peers, ..MACHINE })?;
        merge(&mut report, services, &result)?;
        throughput.push((services, result));
    }
    report.summary.push(throughput_table(&throughput));
    report.summary.push(ratio_table(&throughput, "whole HTTP request, connect() included, p50", ("request", "p50_us")));
    report.summary.push(ratio_table(&throughput, "iperf3, TCP, bit/s", ("bulk", "gbit_per_second")));
    report.notes.push(
        "One virtual machine holds all peers, each in a network namespace of its own, and the servers. Its processor \
         is emulated (QEMU, TCG, one CPU), and each executed instruction advances its clocks by a nanosecond (-icount \
         shift=0). Times are therefore counts of instructions, and requests per second are those of a machine that \
         executes 1,000 million instructions of any kind a second: caches, branches and memory cost nothing there. \
         Ratios show how much work the kernel does; they are not times of any real processor. conntrack's table has \
         the size that kube-proxy gives it by default (131,072)."
            .to_owned(),
    );
    Ok(report)
}

/// Prepares a cluster with `services` Services and runs the measuring guest.
pub(crate) fn boot(plan: &Plan, services: u32, machine: &Machine<'_>) -> Result<Value> {
    let sandbox = Sandbox::new(PREFIX);
    let control_plane = ControlPlane::start(&sandbox);
    node::create(&sandbox, &control_plane);
    let writer = Writer::new(&control_plane);
    let endpoints = plan.endpoints.unwrap_or(ENDPOINTS);
    eprintln!("creating {services} Services with {endpoints} endpoints each");
    writer.create(SUBJECTS.iter().flat_map(Subject::objects));
    writer.create(Shape::new(services, endpoints).objects(0..services));
    writer.create(marker(0).objects());
    let image = image(&sandbox, &control_plane, plan, (services, endpoints), machine)?;
    eprintln!("{services} Services: measuring in a guest");
    let mut guest = image.start();
    let console = guest.follow_to_end(PATIENCE, |line| {
        if !line.starts_with(RESULT) {
            eprintln!("guest: {line}");
        }
    });
    let result = console.lines().find_map(|line| line.strip_prefix(RESULT));
    let Some(result) = result else {
        let tail: Vec<_> = console.lines().rev().take(60).collect();
        bail!("the guest has no result: {}", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
    };
    serde_json::from_str(result).context("the guest's result")
}

/// An image that measures with so many Services and endpoints of each, and turns itself off.
fn image<'s>(
    sandbox: &'s Sandbox,
    control_plane: &ControlPlane<'_>,
    plan: &Plan,
    (services, endpoints): (u32, u32),
    machine: &Machine<'_>,
) -> Result<GuestImage<'s>> {
    let own = std::env::current_exe().context("this program has no path")?;
    let quick = if plan.quick { "--quick" } else { "" };
    let peers: String = machine.peers.iter().map(|peer| format!("--peer {peer} ")).collect();
    let script = format!(
        "#!/bin/sh\n{SET_UP}\nCPROXY_BIN=/usr/bin/cproxy {} inside --services {services} --endpoints {endpoints} \
         {peers}{quick} 2>&1\n\
         echo \"ended: $?\"\npoweroff -f\n",
        own.display()
    );
    let mut image = GuestImage::new(sandbox, &Kernel::from_env())
        .memory_mib(machine.memory_mib)
        .counting_instructions(machine.instruction_shift)
        .program_of_host(&own)
        .program("usr/bin/cproxy", read(&cproxy_binary())?)
        .file("given/ca.crt", control_plane.ca_pem())
        .file("given/agent", inside_guest(control_plane, &control_plane.agent_kubeconfig())?)
        .file("given/kube-proxy", inside_guest(control_plane, &control_plane.kubeconfig_for("system:kube-proxy"))?)
        .file("etc/passwd", "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")
        // ipset looks up protocol names in this file.
        .file("etc/protocols", "tcp 6 TCP\nudp 17 UDP\n")
        .file("etc/group", "root:x:0:\nnogroup:x:65534:\n")
        .parameter("GUEST_INIT=/guest/bench")
        .program("guest/bench", script);
    for name in PROGRAMS {
        image = image.program_of_host(&program(name)?);
    }
    if machine.peers.iter().any(|peer| !matches!(peer, Peer::Direct | Peer::Cproxy)) {
        image = image.program("usr/bin/kube-proxy", read(&control_plane.binary("kube-proxy"))?);
    }
    for extension in fs::read_dir(EXTENSIONS).context(EXTENSIONS)?.flatten() {
        image = image.program_of_host(&extension.path());
    }
    Ok(image)
}

/// Mounts that an init system would make, and the size of conntrack's table that kube-proxy has by default (its setting
/// `conntrack.min`) and cannot set from its network namespace.
const SET_UP: &str = "mount -t sysfs sysfs /sys; mount -t devtmpfs devtmpfs /dev; mount -t tmpfs tmpfs /run
mkdir -p /tmp /sys/fs/cgroup /sys/fs/bpf /var/log/nginx /var/lib/nginx
mount -t cgroup2 cgroup2 /sys/fs/cgroup; mount -t bpf bpf /sys/fs/bpf
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
ulimit -n 20000
conntrack=/sys/module/nf_conntrack/parameters/hashsize
if [ -e $conntrack ]; then
    echo 131072 >/proc/sys/net/netfilter/nf_conntrack_max
    echo 32768 >$conntrack
fi
ip link set lo up";

/// A kubeconfig with the path of the authority's certificate in the guest.
fn inside_guest(control_plane: &ControlPlane<'_>, kubeconfig: &Path) -> Result<String> {
    let text = String::from_utf8(read(kubeconfig)?).context("a kubeconfig")?;
    Ok(text.replace(&control_plane.ca_file().display().to_string(), &format!("{GIVEN}/ca.crt")))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("reading {}", path.display()))
}

fn program(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| file.is_file());
    found.with_context(|| format!("no program {name} in PATH"))
}

/// The part of the benchmark that runs in the guest.
pub(crate) fn inside(plan: &Plan) -> Result<()> {
    let sandbox = Sandbox::new(PREFIX);
    relay(&sandbox)?;
    let given = Path::new(GIVEN);
    let kube_proxy = KubeProxy { binary: "/usr/bin/kube-proxy".into(), kubeconfig: given.join("kube-proxy") };
    let cluster = Cluster::Remote { agent_kubeconfig: given.join("agent"), kube_proxy };
    servers::sink(&sandbox, &servers::SINK)?;
    let _nginx = servers::nginx(&sandbox, &servers::WEB)?;
    let _iperf = servers::iperf(&sandbox, &servers::BULK)?;
    let _named = servers::named_servers(&sandbox, &servers::TEN);
    let peers = if plan.peers.is_empty() { &PEERS } else { plan.peers.as_slice() };
    let mut arena = Arena::new(&sandbox, cluster, peers, &SUBJECTS)?;
    let services = plan.services(&SERVICES);
    let mut report = servers::report("guest", &arena);
    let mut failures = Vec::new();
    plan.at_each(&mut arena, &services, &mut failures, |arena| {
        let services = arena.services();
        add_memory(&mut report, services)?;
        eprintln!("connect(2)");
        let connects = connect::measure(arena, plan.rounds(ROUNDS));
        contest::add(&mut report, "connect(2)", "connect", &[(services, connects)]);
        eprintln!("wrk");
        let participants = contest::participants(arena);
        let requests = wrk::measure(arena, &participants, plan.rounds(WRK_ROUNDS), WRK_SECONDS)?;
        contest::add(&mut report, "wrk, 2,000 connections, Connection: close", "wrk", &[(services, requests)]);
        eprintln!("whole requests");
        let requests = request::measure(arena, plan.rounds(REQUEST_ROUNDS));
        let title = "one HTTP request after the other, each with its connection";
        contest::add(&mut report, title, "request", &[(services, requests)]);
        eprintln!("iperf3");
        let bulk = udp::measure_bulk(arena, plan.rounds(BULK_ROUNDS), BULK_SECONDS);
        contest::add(&mut report, "iperf3, one TCP stream", "bulk", &[(services, bulk)]);
        eprintln!("balance");
        let measured = balance::measure(arena, plan.rounds(BALANCE_ROUNDS));
        balance::add(&mut report, services, measured);
        eprintln!("idle connections");
        redis::idle(arena, &mut report)
    });
    report.failures.extend(failures);
    let tables: Vec<_> = report.tables.iter().map(table_json).collect();
    let Report { notes, failures, versions, samples, .. } = &report;
    let result = json!({
        "tables": tables, "notes": notes, "failures": failures, "versions": versions, "samples": samples,
    });
    println!("{RESULT}{result}");
    Ok(())
}

/// Adds the memory that programs could still have, with every peer's rules in force.
fn add_memory(report: &mut Report, services: u32) -> Result<()> {
    let text = fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let figure = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.split_whitespace().next());
    let kib: u32 = figure.context("/proc/meminfo has no MemAvailable")?.parse().context("/proc/meminfo")?;
    report.add_samples("available_mib", json!({services.to_string(): kib / 1024}));
    Ok(())
}

/// Forwards connections to the API server's own address in the sandbox's namespace, from which it has no route.
fn relay(sandbox: &Sandbox) -> Result<()> {
    let address = SocketAddr::new(ADDRESS, PORT);
    sandbox.add_address(ADDRESS);
    let listener =
        sandbox.netns().run(|| TcpListener::bind(address)).context("listening for the API server's clients")?;
    let outside = sandbox.outside().clone();
    thread::spawn(move || {
        while let Ok((near, _)) = listener.accept() {
            let Ok(far) = outside.run(|| TcpStream::connect(address)) else { continue };
            let (Ok(near_too), Ok(far_too)) = (near.try_clone(), far.try_clone()) else { continue };
            thread::spawn(move || copy(near, far));
            thread::spawn(move || copy(far_too, near_too));
        }
    });
    Ok(())
}

fn copy(mut from: TcpStream, mut to: TcpStream) {
    // Either end may close first, and the other end is shut down.
    io::copy(&mut from, &mut to).ok();
    to.shutdown(std::net::Shutdown::Write).ok();
}

fn table_json(table: &Table) -> Value {
    json!({"title": table.title, "columns": table.columns, "rows": table.rows})
}

pub(crate) fn merge(report: &mut Report, services: u32, result: &Value) -> Result<()> {
    let part = |name: &str| result.get(name).cloned().with_context(|| format!("the guest's result has no {name}"));
    for table in part("tables")?.as_array().into_iter().flatten() {
        let field = |name: &str| table.get(name).cloned().unwrap_or_default();
        report.tables.push(Table {
            title: serde_json::from_value(field("title")).context("a table of the guest")?,
            columns: serde_json::from_value(field("columns")).context("a table of the guest")?,
            rows: serde_json::from_value(field("rows")).context("a table of the guest")?,
        });
    }
    let notes: Vec<String> = serde_json::from_value(part("notes")?).context("notes of the guest")?;
    notes.into_iter().for_each(|note| {
        if !report.notes.contains(&note) {
            report.notes.push(note);
        }
    });
    report.failures.extend(serde_json::from_value::<Vec<_>>(part("failures")?).context("failures of the guest")?);
    report.versions = serde_json::from_value(part("versions")?).context("versions of the guest")?;
    report.add_samples(&services.to_string(), part("samples")?);
    Ok(())
}

/// Ratio of a peer's metric to the direct connection's.
fn ratio((services, result): &(u32, Value), peer: Peer, (benchmark, metric): (&str, &str)) -> Option<Estimate> {
    let samples = |peer: Peer| {
        let samples = result.pointer(&format!("/samples/{benchmark}/{services}/{peer}/{metric}"))?;
        serde_json::from_value::<Vec<f64>>(samples.clone()).ok()
    };
    Estimate::of_ratios(&samples(peer)?, &samples(Peer::Direct)?)
}

/// Ratios to the direct connection's figures, a line for each number of Services.
fn ratio_table(results: &[(u32, Value)], what: &str, pointer: (&str, &str)) -> Table {
    let peers = || PEERS.into_iter().filter(|peer| *peer != Peer::Direct);
    let row = |result: &(u32, Value)| {
        let ratio = |peer| ratio(result, peer, pointer);
        let cell = |peer| ratio(peer).map_or_else(|| "-".to_owned(), |ratio| format!("{:.2}", ratio.median));
        (format!("{} Services", result.0), peers().map(cell).collect())
    };
    Table {
        title: format!("{what}, by instructions, ratio to the direct connection's"),
        columns: peers().map(|peer| peer.to_string()).collect(),
        rows: results.iter().map(row).collect(),
    }
}

/// Requests per second, in the table form common in comparisons of kube-proxy's modes.
fn throughput_table(results: &[(u32, Value)]) -> Table {
    let median = |result: &Value, services: u32, peer: Peer| {
        let samples = result.pointer(&format!("/samples/wrk/{services}/{peer}/requests_per_second"))?;
        let samples: Vec<f64> = serde_json::from_value(samples.clone()).ok()?;
        Some(format!("{:.0}", Estimate::of(samples)?.median))
    };
    let row = |(services, result): &(u32, Value)| {
        let cells = PEERS.map(|peer| median(result, *services, peer).unwrap_or_else(|| "-".to_owned()));
        (format!("{services} Services"), cells.into())
    };
    Table {
        title: "wrk, 2,000 connections, requests/s of an emulated processor at 1,000 MIPS".to_owned(),
        columns: PEERS.map(|peer| peer.to_string()).into(),
        rows: results.iter().map(row).collect(),
    }
}
