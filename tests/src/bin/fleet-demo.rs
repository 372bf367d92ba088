//! The demonstration of a fleet: Deployments, a Service and clients whose pods are microVMs, with the real controllers,
//! the real virtual-kubelet and CoreDNS. Every printed statement is checked first; times are those of emulated
//! processors.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use cproxy_tests::{
    fleet::{Clients, Fleet, NAMESERVER, PATIENCE, Pod, Selector, WEB},
    population::Shape,
    process::eventually,
    sandbox::Sandbox,
    supervised,
};
use serde_json::json;

/// Prefix of the names of all objects of the demonstration.
const PREFIX: &str = "cproxy-demo";

/// Number of VMs of the Deployment after it was scaled.
const SERVERS: usize = 3;

/// Number of clients.
const CLIENTS: usize = 2;

/// Services beside that of the demonstration.
const POPULATION: Shape = Shape::new(1_000, 10);

/// Time after the last VM is ready in which its agent's requests still count, and after the last one has gone.
const SETTLE: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    supervised::run(PREFIX, demonstrate)
}

fn demonstrate() -> Result<(), String> {
    let most = std::env::args().nth(1).and_then(|number| number.parse().ok()).unwrap_or(10);
    let sandbox = Sandbox::new(PREFIX);
    println!("Everything happens in a network namespace of its own; nothing of this machine is changed.\n");
    let mut demo = Demo::start(&sandbox);
    demo.population();
    demo.nameserver();
    demo.service();
    demo.scaling(most);
    let clients = demo.clients();
    demo.rolling(&clients);
    demo.death(&clients);
    demo.snapshot(&clients);
    drop(clients);
    demo.bad_image();
    demo.switched_off();
    demo.relay(most);
    let directory = sandbox.dir().to_owned();
    drop(demo);
    drop(sandbox);
    if directory.exists() {
        return Err(format!("{} should be gone and is not", directory.display()));
    }
    println!("The VMs, the control plane and all else are gone: nothing is left.");
    Ok(())
}

/// The fleet and the time since its start.
struct Demo<'s> {
    fleet: Fleet<'s>,
    start: Instant,
    /// CPU time of the API server for each VM that follows it itself.
    direct: Option<Duration>,
}

impl<'s> Demo<'s> {
    fn start(sandbox: &'s Sandbox) -> Self {
        let start = Instant::now();
        println!("  seconds");
        let fleet = Fleet::start(sandbox);
        let demo = Self { fleet, start, direct: None };
        demo.say("etcd, kube-apiserver, kube-controller-manager, kube-scheduler and the virtual node run");
        demo
    }

    fn say(&self, text: impl AsRef<str>) {
        println!("{:9.2}  {}", self.start.elapsed().as_secs_f64(), text.as_ref());
    }

    /// The Services that the agents of all VMs follow.
    fn population(&self) {
        self.fleet.populate(POPULATION);
        let Shape { services, endpoints } = POPULATION;
        self.say(format!("the cluster has {services} other Services with {endpoints} endpoints each"));
    }

    /// CoreDNS in a VM.
    fn nameserver(&self) {
        self.fleet.apply(NAMESERVER);
        let (pods, took) = self.fleet.wait_ready(Selector::NAMESERVER, 1);
        self.say(format!("CoreDNS is ready in a VM of its own, {}, after {}", first(&pods).ip, seconds(took)));
        self.say("     it reaches the API server at its ClusterIP, 10.96.0.1, through cproxy");
    }

    /// A Deployment, its Service and a client, which are there from here on.
    fn service(&self) {
        self.fleet.apply(WEB);
        let (pods, took) = self.fleet.wait_ready(Selector::WEB, 2);
        self.say(format!("the Deployment web has two VMs after {}: {}", seconds(took), names(&pods)));
        let start = Instant::now();
        let clients = Clients::start(&self.fleet, 1);
        let wanted: BTreeSet<_> = pods.iter().map(|pod| pod.name.clone()).collect();
        eventually(PATIENCE, "both pods have answered", || {
            let answered = clients.answered();
            if answered == wanted { Ok(()) } else { Err(format!("{answered:?}: {}", clients.text(0))) }
        });
        self.say(format!(
            "a client in a VM has answers of both from http://web, {} after its creation",
            seconds(start.elapsed())
        ));
        drop(clients);
        self.fleet.kubectl(&["delete", "pods", "--selector=app=client"]);
    }

    /// Time from `kubectl scale` to the last ready pod, from nothing each time.
    fn scaling(&mut self, most: usize) {
        for count in [1, 5, 10].into_iter().filter(|count| *count < most).chain([most]) {
            let (took, cpu) = self.scale_from_nothing(count);
            self.say(format!(
                "kubectl scale from 0 to {count}: all ready after {}; CPU time of the API server: {} ms for each VM",
                seconds(took),
                cpu.as_millis()
            ));
            self.direct = Some(cpu);
        }
        let (pods, took) = self.fleet.scale(SERVERS);
        self.say(format!("kubectl scale to {SERVERS}, {}: {}", seconds(took), names(&pods)));
    }

    /// Time to the last ready pod, and the API server's CPU time for each VM beyond what it uses without a change.
    fn scale_from_nothing(&self, count: usize) -> (Duration, Duration) {
        self.fleet.scale(0);
        self.fleet.wait_gone(Selector::WEB);
        thread::sleep(SETTLE);
        let (before, start) = (self.fleet.api_server_cpu(), Instant::now());
        thread::sleep(SETTLE);
        let (idle, measured) = (self.fleet.api_server_cpu(), start.elapsed());
        let (_, took) = self.fleet.scale(count);
        thread::sleep(SETTLE);
        let used = (self.fleet.api_server_cpu() - idle).as_secs_f64();
        let unrelated =
            (idle - before).as_secs_f64() * (start.elapsed() - measured).as_secs_f64() / measured.as_secs_f64();
        let vms = f64::from(u32::try_from(count).unwrap_or(u32::MAX));
        (took, Duration::from_secs_f64((used - unrelated).max(0.0) / vms))
    }

    fn clients(&self) -> Clients {
        let clients = Clients::start(&self.fleet, CLIENTS);
        self.say(format!("{CLIENTS} clients in VMs ask http://web with a new connection each time"));
        clients
    }

    fn rolling(&self, clients: &Clients) {
        let (messages, start) = (clients.messages(), Instant::now());
        let before = self.fleet.wait_ready(Selector::WEB, SERVERS).0;
        self.fleet.kubectl(&["rollout", "restart", "deployment/web"]);
        self.fleet.kubectl(&["rollout", "status", "deployment/web", "--timeout=300s"]);
        let (after, _) = self.fleet.wait_ready(Selector::WEB, SERVERS);
        let took = start.elapsed();
        assert!(after.iter().all(|pod| before.iter().all(|old| old.name != pod.name)), "{before:?} {after:?}");
        clients.wait_for_each("answer ");
        self.say(format!("kubectl rollout restart: {SERVERS} new VMs after {}", seconds(took)));
        self.say_failures(&clients.messages(), &messages);
    }

    fn say_failures(&self, now: &BTreeMap<String, usize>, before: &BTreeMap<String, usize>) {
        let new = now.iter().map(|(message, count)| (message, count - before.get(message).copied().unwrap_or(0)));
        let new: Vec<_> = new.filter(|(_, count)| *count > 0).collect();
        if new.is_empty() {
            self.say("     no request of a client has failed");
        }
        for (message, count) in new {
            self.say(format!("     {count} requests have failed: {message}"));
        }
    }

    fn death(&self, clients: &Clients) {
        let (pods, _) = self.fleet.wait_ready(Selector::WEB, SERVERS);
        let victim = first(&pods);
        let (failed, messages, start) = (clients.failures(), clients.messages(), Instant::now());
        self.fleet.kill_machine(victim);
        self.fleet.wait_pod(Selector::WEB, &victim.name, |pod| pod.phase == "Failed");
        self.say(format!("the VM of {} was killed; its pod is Failed after {}", victim.name, seconds(start.elapsed())));
        let (last, failed) = clients.last_failure_since(start, failed);
        if failed > 0 {
            self.say(format!("     the last client has left it after {}", seconds(last)));
        }
        self.say_failures(&clients.messages(), &messages);
        self.fleet.wait_ready(Selector::WEB, SERVERS);
        self.say(format!(
            "     the Deployment has a new VM, ready at most {} after the death",
            seconds(start.elapsed())
        ));
        self.fleet.kubectl(&["delete", "pod", &victim.name]);
    }

    /// A client's VM is saved, all endpoints change, and the VM goes on.
    fn snapshot(&self, clients: &Clients) {
        let name = "client-1";
        self.fleet.kubectl(&["annotate", "pod", name, "vm.cproxy.dev/power=saved"]);
        self.wait_event("Saved");
        self.say(format!("{name} was saved into a file, and its VM is off"));
        self.fleet.kubectl(&["rollout", "restart", "deployment/web"]);
        self.fleet.kubectl(&["rollout", "status", "deployment/web", "--timeout=300s"]);
        let (pods, _) = self.fleet.wait_ready(Selector::WEB, SERVERS);
        self.say(format!("     meanwhile all VMs of web were replaced: {}", names(&pods)));
        let (start, old) = (Instant::now(), clients.text(0).len());
        self.fleet.kubectl(&["annotate", "pod", name, "vm.cproxy.dev/power-"]);
        let answer = eventually(PATIENCE, "the restored client has an answer of a new VM", || {
            let text = clients.text(0);
            let new = text.get(old..).unwrap_or_default();
            let pod = pods.iter().find(|pod| new.contains(&pod.name));
            pod.map(|pod| pod.name.clone()).ok_or_else(|| new.to_owned())
        });
        self.say(format!(
            "     restored, it has its first answer of a new one, {answer}, after {}",
            seconds(start.elapsed())
        ));
        self.fleet.kubectl(&["delete", "pods", "--selector=app=client"]);
    }

    fn wait_event(&self, reason: &str) {
        let selector = format!("--field-selector=reason={reason}");
        eventually(PATIENCE, format!("an event {reason}"), || {
            let events = self.fleet.kubectl(&["get", "events", &selector]);
            if events.contains(reason) { Ok(()) } else { Err(self.fleet.kubectl(&["get", "events"])) }
        });
    }

    fn bad_image(&self) {
        let manifest = Fleet::client("client-of-nothing", &json!({})).replace("fleet.cproxy.dev/busybox", "nothing:1");
        self.fleet.apply(&manifest);
        let is_refused = |pod: &Pod| pod.reason.contains("Image");
        let pod = self.fleet.wait_pod(Selector::CLIENTS, "client-of-nothing", is_refused);
        self.say(format!("a pod of an image that does not exist: {}: {}", pod.reason, pod.message));
        self.fleet.kubectl(&["delete", "pod", "client-of-nothing"]);
    }

    fn switched_off(&self) {
        self.fleet.apply(&Fleet::client("client-without", &json!({"cproxy.dev/enabled": "false"})));
        self.fleet.wait_ready(Selector::CLIENTS, 1);
        let log = self.fleet.follow_logs("client-without");
        eventually(PATIENCE, "the client fails", || if log.log().contains("failed") { Ok(()) } else { Err(log.log()) });
        self.say("a pod with the annotation cproxy.dev/enabled: \"false\" runs without cproxy, and finds no Service");
        self.fleet.kubectl(&["delete", "pod", "client-without"]);
    }

    fn relay(&mut self, most: usize) {
        self.fleet.start_relay();
        self.fleet.scale(0);
        let annotations = json!({"cproxy.dev/apiserver": Fleet::relay_url()});
        let patch = json!({"spec": {"template": {"metadata": {"annotations": annotations}}}}).to_string();
        self.fleet.kubectl(&["patch", "deployment/web", "--patch", &patch]);
        let (took, cpu) = self.scale_from_nothing(most);
        self.say(format!(
            "behind a relay, from 0 to {most}: all ready after {}; {} watches of Services at the relay",
            seconds(took),
            self.fleet.relay_watches()
        ));
        let direct = self.direct.unwrap_or_default();
        self.say(format!(
            "     CPU time of the API server: {} ms for each VM, {} ms without the relay",
            cpu.as_millis(),
            direct.as_millis()
        ));
        let clients = Clients::start(&self.fleet, CLIENTS);
        self.say("     one client behind the relay and one beside it have answers");
        drop(clients);
    }
}

#[expect(clippy::expect_used, reason = "the pods were waited for")]
fn first(pods: &[Pod]) -> &Pod {
    pods.first().expect("there is no pod")
}

fn names(pods: &[Pod]) -> String {
    pods.iter().map(|pod| format!("{} ({})", pod.name, pod.ip)).collect::<Vec<_>>().join(", ")
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}
