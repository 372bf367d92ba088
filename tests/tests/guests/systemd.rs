//! The overlay's units under a real systemd: units that need Services start after them, Kata's agent does not wait, and
//! the policy decides if Services do not come up.

use std::{fs, net::TcpListener, path::Path};

use cproxy_tests::{
    guest::{GuestImage, Kernel},
    http,
    manifest::{self, http_service},
    outside::SECRETS,
    sandbox::Sandbox,
};
use serde_json::Value;

use crate::common::{PATIENCE, values_of};

/// Programs of systemd: itself, the one that prints its state, and, since 255, the one that starts services.
const PROGRAMS: [&str; 3] = ["/usr/lib/systemd/systemd", "/usr/bin/systemctl", "/usr/lib/systemd/systemd-executor"];

/// Targets that order the units. systemd starts without all others.
const TARGETS: [&str; 4] = ["sysinit.target", "basic.target", "multi-user.target", "shutdown.target"];

const UNITS: &str = "etc/systemd/system";

/// Script that prints the states of the other units, once all units of the boot target have finished or failed.
const WITNESS: &str = "#!/bin/sh
for unit in cproxy cproxy-wait containerd multi-user.target; do echo \"$unit: $(systemctl is-active $unit)\"; done
reboot -f
";

const VIP: &str = "10.96.0.20";
const POD: &str = "10.244.0.1";
/// Address of a server that accepts connections and sends nothing.
const SILENT: &str = "10.244.0.2:6443";

/// A guest with systemd and the overlay, which boots to this target.
fn guest<'s>(sandbox: &'s Sandbox, target: &str) -> GuestImage<'s> {
    let image = GuestImage::new(sandbox, &Kernel::from_env())
        .memory_mib(256)
        .parameter("GUEST_INIT=/usr/lib/systemd/systemd")
        .parameter(format!("systemd.unit={target}"))
        // There is no journal.
        .parameter("systemd.default_standard_output=tty systemd.show_status=1 systemd.log_color=0")
        .rootfs();
    let programs = PROGRAMS.map(Path::new).into_iter().filter(|program| program.exists());
    let image = programs.fold(image, GuestImage::program_of_host);
    TARGETS.into_iter().fold(image, |image, name| {
        let path = Path::new("/usr/lib/systemd/system").join(name);
        image.file(&format!("usr/lib/systemd/system/{name}"), fs::read(path).expect(name))
    })
}

/// A unit that runs a script once, started with the target `wanted_by`.
fn unit<'s>(image: GuestImage<'s>, name: &str, order: &str, wanted_by: &str, script: &str) -> GuestImage<'s> {
    let text = format!(
        "[Unit]\n{order}\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/usr/libexec/{name}\n\
         [Install]\nWantedBy={wanted_by}\n"
    );
    image
        .program(&format!("usr/libexec/{name}"), script)
        .file(&format!("{UNITS}/{name}.service"), text)
        .link(&format!("{UNITS}/{wanted_by}.wants/{name}.service"), &format!("/{UNITS}/{name}.service"))
}

/// The console of a guest with a stand-in for containerd, ordered by the overlay alone.
fn console_of_runtime(image: GuestImage<'_>, script: &str) -> String {
    let image = unit(image, "containerd", "", "multi-user.target", script);
    let order = "DefaultDependencies=no\nAfter=containerd.service multi-user.target";
    unit(image, "witness", order, "multi-user.target", WITNESS).start().wait_end(PATIENCE)
}

fn web() -> [Value; 2] {
    http_service("web", VIP, [POD])
}

#[test]
fn a_container_runtime_starts_when_services_work() {
    let sandbox = Sandbox::for_test();
    sandbox.add_address(POD);
    let _pod = http::serve(&sandbox, (POD, 8080), "pod-1");
    let image = guest(&sandbox, "multi-user.target")
        .parameter("cproxy.manifests=/etc/cproxy/manifests")
        .parameter("cproxy.timeout=60s")
        .file("etc/cproxy/manifests/web.json", manifest::list(web()));
    let script = format!(
        "#!/bin/sh\n[ ! -e /run/cproxy/ready ] || echo 'runtime: the table is complete'\n\
         echo \"runtime: web is $(wget -qO- http://{VIP})\"\n\
         systemctl start cproxy && echo 'runtime: cproxy has started'\n\
         echo \"rights: $(cproxy check | grep ' confinement ')\"\n"
    );
    let console = console_of_runtime(image, &script);
    assert_eq!(
        values_of(&console, "runtime: "),
        ["the table is complete", "web is pod-1", "cproxy has started"],
        "{console}"
    );
    let rights = values_of(&console, "rights: ").concat();
    assert!(rights.starts_with("ok ") && rights.ends_with("; system calls are filtered"), "{console}");
    for unit in ["cproxy", "cproxy-wait", "containerd", "multi-user.target"] {
        assert_eq!(values_of(&console, &format!("{unit}: ")).last(), Some(&"active"), "{unit}: {console}");
    }
    // Order of systemd's messages. Those of the agent come through the journal, and may be torn by others.
    let at = |words: &str| console.find(words).unwrap_or_else(|| panic!("no {words:?} in {console}"));
    assert!(at("Finished cproxy-wait.service") < at("Starting containerd.service"), "{console}");
}

#[test]
fn a_disabled_cproxy_is_inactive_and_a_container_runtime_starts() {
    let sandbox = Sandbox::for_test();
    let image = guest(&sandbox, "multi-user.target").parameter("cproxy.enabled=false");
    let console = console_of_runtime(image, "#!/bin/sh\nsleep 3\n");
    assert_eq!(values_of(&console, "cproxy: ").last(), Some(&"inactive"), "{console}");
    for unit in ["cproxy-wait", "containerd", "multi-user.target"] {
        assert_eq!(values_of(&console, &format!("{unit}: ")).last(), Some(&"active"), "{unit}: {console}");
    }
    let starts = console.lines().filter(|line| line.contains("INFO") && line.contains("cproxy is disabled"));
    assert_eq!(starts.count(), 1, "it is not started again: {console}");
}

#[test]
fn the_policy_decides_about_a_container_runtime_without_services() {
    let sandbox = Sandbox::for_test();
    sandbox.add_address(SILENT.split(':').next().unwrap());
    let _silent = TcpListener::bind(SILENT).unwrap();
    let authority = rcgen::generate_simple_self_signed(["silent".to_owned()]).unwrap().cert.pem();
    for (policy, runs) in [("fail", false), ("start", true)] {
        let image = guest(&sandbox, "multi-user.target")
            .parameter(format!("cproxy.apiserver=https://{SILENT}"))
            .parameter("cproxy.timeout=4s")
            .parameter(format!("cproxy.on-timeout={policy}"))
            .file(&format!("{SECRETS}/token"), "token")
            .file(&format!("{SECRETS}/ca.crt"), &authority);
        let console = console_of_runtime(image, "#!/bin/sh\necho \"runtime: $(ls /run/cproxy/ready 2>&1)\"\n");
        let ran = values_of(&console, "runtime: ");
        assert_eq!(ran.len(), usize::from(runs), "{policy}: {console}");
        assert!(ran.iter().all(|line| line.contains("No such file")), "{policy}: {console}");
        // The reason depends on how far a slow guest has come: no agent answers, or it has received nothing.
        assert!(console.contains("cproxy: not ready after 4s: "), "{policy}: {console}");
        assert_eq!(console.contains("Dependency failed for containerd.service"), !runs, "{policy}: {console}");
        let (wait, runtime) = if runs { ("active", "active") } else { ("failed", "inactive") };
        // No other unit waits: the machine has booted, and the agent goes on trying.
        for (unit, state) in
            [("cproxy", "activating"), ("cproxy-wait", wait), ("containerd", runtime), ("multi-user.target", "active")]
        {
            assert_eq!(values_of(&console, &format!("{unit}: ")).last(), Some(&state), "{policy}, {unit}: {console}");
        }
    }
}

/// The stand-in for Kata's agent creates the agent's source, as Kata's agent does with the network to the source; then
/// it runs the hook, and a container's process.
#[test]
fn katas_agent_does_not_wait_for_services_and_its_hook_does() {
    let sandbox = Sandbox::for_test();
    sandbox.add_address(POD);
    let _pod = http::serve(&sandbox, (POD, 8080), "pod-1");
    let hook = Path::new(env!("CARGO_MANIFEST_DIR")).join("../images/kata/prestart/10-cproxy");
    let image = guest(&sandbox, "kata-containers.target")
        .parameter("cproxy.manifests=/run/network")
        .parameter("cproxy.timeout=60s")
        .file(
            "usr/lib/systemd/system/kata-containers.target",
            "[Unit]\nRequires=basic.target\nAfter=basic.target\nAllowIsolate=yes\n",
        )
        .program("usr/share/oci/hooks/prestart/10-cproxy", fs::read(hook).unwrap())
        .file("usr/share/network/web.json", manifest::list(web()));
    let script = format!(
        "#!/bin/sh\n[ -e /run/cproxy/ready ] || echo 'agent: started without Services'\n\
         until [ -e /run/cproxy/failed ]; do sleep 0.1; done\n\
         cp -r /usr/share/network /run\n\
         echo '{{}}' | /usr/share/oci/hooks/prestart/10-cproxy && echo \"agent: web is $(wget -qO- http://{VIP})\"\n\
         reboot -f\n"
    );
    let console = unit(image, "kata-agent", "", "kata-containers.target", &script).start().wait_end(PATIENCE);
    assert_eq!(values_of(&console, "agent: "), ["started without Services", "web is pod-1"], "{console}");
}

#[test]
fn a_peer_pods_agent_starts_when_services_work() {
    let sandbox = Sandbox::for_test();
    sandbox.add_address(POD);
    let _pod = http::serve(&sandbox, (POD, 8080), "pod-1");
    let drop_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("../images/peer-pods/kata-agent.service.d/10-cproxy.conf");
    let image = guest(&sandbox, "multi-user.target")
        .parameter("cproxy.manifests=/etc/cproxy/manifests")
        .parameter("cproxy.timeout=60s")
        .file("etc/cproxy/manifests/web.json", manifest::list(web()))
        .file(&format!("{UNITS}/kata-agent.service.d/10-cproxy.conf"), fs::read(drop_in).unwrap());
    let script = format!(
        "#!/bin/sh\n[ ! -e /run/cproxy/ready ] || echo 'agent: the table is complete'\n\
         echo \"agent: web is $(wget -qO- http://{VIP})\"\n\
         reboot -f\n"
    );
    let console = unit(image, "kata-agent", "", "multi-user.target", &script).start().wait_end(PATIENCE);
    assert_eq!(values_of(&console, "agent: "), ["the table is complete", "web is pod-1"], "{console}");
}
