//! Many clients that arrive or come back at once, and clients that do not read.

use std::{thread, time::Duration};

use anyhow::{Context as _, Result};
use cproxy_benches::summary::Summary;
use cproxy_tests::{
    control_plane::{ADDRESS_V6, PORT},
    kube_proxy::nft,
    relay_server::RunningRelay,
    sandbox::Sandbox,
    usage::{Memory, cpu_time},
};

use crate::{
    CALM, RELAY,
    bystander::Bystander,
    changes::Changer,
    clock::{between, now_ns},
    generator::Generator,
    place::{Place, memory_at_rest},
    rates::{self, AtRate, Subject},
};

/// Time within which all clients arrive.
const ARRIVAL: Duration = Duration::from_secs(10);

/// Rate of changes while the API server cannot be reached.
const CHANGES_PER_S: u32 = 1;

/// Slow clients, and normal ones beside them.
const SLOW: u32 = 1_000;
const BESIDE_SLOW: u32 = 2_000;

/// Storm, and how clients and relay got over it.
#[derive(Debug)]
pub(crate) struct Storm {
    pub(crate) name: String,
    pub(crate) clients: u32,
    /// Time from its begin until the last client had everything.
    pub(crate) time: Duration,
    /// CPU time of the relay that served at its end.
    pub(crate) relay_cpu: Duration,
    /// Peak of the memory of that relay.
    pub(crate) peak_bytes: u64,
    /// Lists that clients began.
    pub(crate) lists: u64,
    /// Response times of a bystander in milliseconds.
    pub(crate) bystander: Option<Summary>,
}

impl Storm {
    /// One line.
    pub(crate) fn text(&self) -> String {
        let bystander = self.bystander.map_or_else(String::new, |summary| {
            format!(", bystander p50 {:.1} p99 {:.1} max {:.1} ms", summary.p50, summary.p99, summary.max)
        });
        format!(
            "{} ({} clients): all have everything after {:.2} s, relay's CPU {:.2} s, its peak {:.1} MiB, {} lists{}",
            self.name,
            self.clients,
            self.time.as_secs_f64(),
            self.relay_cpu.as_secs_f64(),
            self.peak_bytes as f64 / f64::from(1 << 20),
            self.lists,
            bystander,
        )
    }
}

/// Clients, their relays, and what changes.
struct Scene<'p, 's> {
    place: &'p mut Place<'s>,
    relays: Vec<RunningRelay>,
    generator: Generator,
    changer: &'p mut Changer,
}

/// All storms, one after the other.
pub(crate) fn measure(
    place: &mut Place<'_>,
    changer: &mut Changer,
    clients: u32,
    cut: Duration,
    storms: &mut Vec<Storm>,
) -> Result<()> {
    storms.push(arrive(place, clients)?);
    let relays = vec![place.start_relay(0, &[])?];
    let generator = Generator::start(place.sandbox)?;
    let mut scene = Scene { place, relays, generator, changer };
    scene.generator.start_clients(&scene.place.clients(1, clients, CALM * clients))?;
    scene.generator.wait_for_lists()?;
    storms.push(scene.restart_relay()?);
    storms.push(scene.restart_api_server()?);
    storms.push(scene.cut_upstream(cut)?);
    drop(scene);
    storms.push(fail_over(place, changer, clients)?);
    Ok(())
}

/// Clients that decode nothing arrive at a relay of their own.
fn arrive(place: &Place<'_>, clients: u32) -> Result<Storm> {
    let relay = place.start_relay(0, &[])?;
    let mut generator = Generator::start(place.sandbox)?;
    let (server, versions) = (Place::relay_address(), ["services", "endpointslices"].map(|of| version_of(&relay, of)));
    let bystander = Bystander::start(place.sandbox, server);
    thread::sleep(Duration::from_millis(500));
    let (begin, cpu, cpu_of_generator) = (now_ns(), cpu_time(relay.pid()), generator.cpu_time());
    let end = generator.run_readers(clients, server, versions, ARRIVAL)?;
    let storm = Storm {
        name: format!("all arrive within {} s", ARRIVAL.as_secs()),
        clients,
        time: between(begin, end),
        relay_cpu: cpu_time(relay.pid()) - cpu,
        peak_bytes: Memory::of(relay.pid()).peak,
        lists: u64::from(clients) * 2,
        bystander: Some(bystander.end()?),
    };
    eprintln!("{}; the generator's CPU {:?}", storm.text(), generator.cpu_time() - cpu_of_generator);
    Ok(storm)
}

/// Version up to which a relay has all objects of a resource.
fn version_of(relay: &RunningRelay, resource: &str) -> u64 {
    relay.metric(&format!("cproxy_relay_resource_version{{resource=\"{resource}\"}}")) as u64
}

/// Kills one of two relays, both of which all clients know.
fn fail_over(place: &mut Place<'_>, changer: &mut Changer, clients: u32) -> Result<Storm> {
    let relays = vec![place.start_relay(0, &[])?, place.start_relay(1, &[])?];
    let generator = Generator::start(place.sandbox)?;
    let mut scene = Scene { place, relays, generator, changer };
    scene.generator.start_clients(&scene.place.clients(2, clients, CALM * clients))?;
    scene.generator.wait_for_lists()?;
    // Clients come with a version from before the last change.
    scene.change_and_settle()?;
    scene.storm("one of two relays is killed", |scene| {
        let begin = now_ns();
        scene.relays.swap_remove(0).kill();
        Ok(begin)
    })
}

impl Scene<'_, '_> {
    fn restart_relay(&mut self) -> Result<Storm> {
        self.change_and_settle()?;
        self.storm("the only relay is killed and started again", |scene| {
            let begin = now_ns();
            scene.relays.swap_remove(0).kill();
            scene.relays.push(scene.place.start_relay(0, &[])?);
            Ok(begin)
        })
    }

    fn restart_api_server(&mut self) -> Result<Storm> {
        self.change_and_settle()?;
        self.storm("the API server is killed and started again", |scene| {
            let begin = now_ns();
            scene.place.control_plane.kill_api_server();
            scene.place.control_plane.start_api_server();
            scene.changer.reconnect(&scene.place.control_plane);
            Ok(begin)
        })
    }

    fn cut_upstream(&mut self, cut: Duration) -> Result<Storm> {
        self.change_and_settle()?;
        let name = format!("the relay cannot reach the API server for {} s", cut.as_secs());
        let (changes, objects) = (cut.as_secs() as u32 * CHANGES_PER_S, self.place.shape.slices() as usize);
        self.storm(&name, |scene| {
            cut_off(scene.place.sandbox);
            let changed = scene.changer.changes(CHANGES_PER_S.into(), changes, objects);
            reconnect(scene.place.sandbox);
            changed.map(drop)?;
            Ok(now_ns())
        })
    }

    fn relay(&self) -> Result<&RunningRelay> {
        self.relays.first().context("no relay runs")
    }

    fn change_and_settle(&mut self) -> Result<()> {
        let versions = self.changer.change_both()?;
        self.generator.settle(versions).map(drop)
    }

    /// Does something to relays or API server, makes a change, and waits until all clients have it. `act` returns the
    /// moment from which the time counts.
    fn storm(&mut self, name: &str, act: impl FnOnce(&mut Self) -> Result<u64>) -> Result<Storm> {
        eprintln!("{name}");
        let (before, lists) = (self.relay_cpu(), self.generator.counts()?.lists);
        let begin = act(self)?;
        let versions = self.changer.change_both()?;
        let end = self.generator.settle(versions)?;
        rates::check(self.place, &mut self.generator, self.changer)?;
        let relay = self.relay()?.pid();
        let cpu = before.iter().find(|(pid, _)| *pid == relay).map_or(Duration::ZERO, |(_, cpu)| *cpu);
        let storm = Storm {
            name: name.to_owned(),
            clients: self.generator.clients,
            time: between(begin, end),
            relay_cpu: cpu_time(relay).saturating_sub(cpu),
            peak_bytes: Memory::of(relay).peak,
            lists: self.generator.counts()?.lists - lists,
            bystander: None,
        };
        eprintln!("{}", storm.text());
        Ok(storm)
    }

    fn relay_cpu(&self) -> Vec<(u32, Duration)> {
        self.relays.iter().map(|relay| (relay.pid(), cpu_time(relay.pid()))).collect()
    }
}

/// Result beside clients that do not read.
pub(crate) struct BesideSlow {
    /// Without and with slow clients.
    pub(crate) rates: [AtRate; 2],
    /// Memory of the relay, likewise.
    pub(crate) memory: [Memory; 2],
}

/// Changes while many clients read one byte a second.
pub(crate) fn measure_beside_slow(
    place: &Place<'_>,
    changer: &mut Changer,
    rate: (u32, usize),
    seconds: u32,
) -> Result<BesideSlow> {
    let relay = place.start_relay(0, &[])?;
    let mut generator = Generator::start(place.sandbox)?;
    generator.start_clients(&place.clients(1, BESIDE_SLOW, CALM * BESIDE_SLOW))?;
    generator.wait_for_lists()?;
    let mut measured = |generator: &mut Generator, remark| {
        let subject = Subject { server: RELAY, relay: Some(&relay), remark };
        let at_rate = rates::measure(place, &subject, generator, changer, rate, seconds)?;
        Ok::<_, anyhow::Error>((at_rate, memory_at_rest(relay.pid())))
    };
    let (without, memory_without) = measured(&mut generator, " without slow clients")?;
    let version = version_of(&relay, "endpointslices");
    generator.start_slow(SLOW, Place::relay_address(), version)?;
    let (with, memory_with) = measured(&mut generator, " beside slow clients")?;
    let counts = generator.counts()?;
    eprintln!(
        "{SLOW} slow clients have read {} bytes, {} have ended; the relay's memory: {memory_without:?}, \
         {memory_with:?}",
        counts.slow_bytes, counts.slow_ended
    );
    Ok(BesideSlow { rates: [without, with], memory: [memory_without, memory_with] })
}

/// Drops all packets between relays and the API server.
fn cut_off(sandbox: &Sandbox) {
    let rules = format!(
        "table ip6 cut {{\n\
             chain output {{\n\
                 type filter hook output priority 0;\n\
                 ip6 daddr {ADDRESS_V6} tcp dport {PORT} drop\n\
                 ip6 saddr {ADDRESS_V6} tcp sport {PORT} drop\n\
             }}\n\
         }}\n"
    );
    nft(sandbox, &["-f", "-"], &rules);
}

fn reconnect(sandbox: &Sandbox) {
    nft(sandbox, &["delete", "table", "ip6", "cut"], "");
}
