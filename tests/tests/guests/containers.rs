//! The sidecar of images/kubernetes in a guest with cgroup v2 only, started by a real runc with a container runtime's
//! configuration: the processes that it serves, and its messages about them.

use std::{fs, path::Path};

use cproxy_tests::{
    guest::{GuestImage, Kernel},
    http,
    manifest::{self, http_service},
    oci::OciImage,
    outside::SECRETS,
    sandbox::Sandbox,
};
use serde_json::{Value, json};

use crate::common::{PATIENCE, values_of};

const VIP: &str = "10.96.0.20";
const POD: &str = "10.244.0.1";

/// Host programs: the runtime, and util-linux's nsenter, as that of busybox does not support cgroup namespaces.
const PROGRAMS: [&str; 2] = ["/usr/sbin/runc", "/usr/bin/nsenter"];

/// Root directory of all containers, with the image's files.
const ROOT: &str = "containers/root";
/// Path of the machine's cgroups in the example.
const OVERLAY: &str = "/host/sys/fs/cgroup";
/// Path of the container's own cgroup, as runtimes mount it.
const CGROUP: &str = "/sys/fs/cgroup";

/// Script that moves the guest to another root: a runtime uses pivot_root(2), which the kernel refuses on an initramfs.
const NEW_ROOT: &str = "#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mkdir /new && mount -t tmpfs -o mode=755 tmpfs /new
mkdir /new/dev /new/proc /new/sys /new/run
for dir in bin containers etc guest lib lib64 sbin usr; do [ ! -e /$dir ] || cp -a /$dir /new; done
exec switch_root /new /guest/machine
";

/// Script that sets up the machine as systemd and a kubelet would, and then starts the containers one by one.
const MACHINE: &str = r#"#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin NO_COLOR=1
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev; mount -t tmpfs tmpfs /run
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup; mount -t bpf -o mode=700 bpf /sys/fs/bpf
ip link set lo up
mkdir -p /sys/fs/cgroup/kubepods/pod-1/other
# What a process in a container of the pod gets.
web() { sh -c "echo 0 >/sys/fs/cgroup/kubepods/pod-1/$1/cgroup.procs; exec timeout 5 wget -qO- http://VIP 2>&1"; }
start() {
    rm -rf /run/volumes; mkdir -p /run/volumes; mkdir -m 777 /run/volumes/run
    runc run --detach --bundle /containers/$1 $1 </dev/null >/run/$1.log 2>&1 ||
        echo "$1 does not start: $(cat /run/$1.log)"
}
pid() { head -n 1 /sys/fs/cgroup/kubepods/pod-1/$1/cgroup.procs; }
# Beside the agent, as a probe is, without another start of the runtime.
beside() { name=$1; shift; /usr/bin/nsenter --all --target $(pid $name) "$@"; }
probe() { beside $1 /usr/bin/cproxy wait --timeout 0 2>&1; }
end() {
    runc kill $1 KILL
    until runc delete $1 2>/dev/null; do sleep 0.1; done
    cproxy cleanup >/dev/null
}
start unreachable
until grep '192.0.2.1:6443: ' /run/unreachable.log >/dev/null; do sleep 0.1; done
# An agent on an emulated processor may be too busy to answer in time.
until probe unreachable | grep 'received nothing' >/run/said; do sleep 0.1; done
probe unreachable >/dev/null
echo "unreachable probe: $? $(cat /run/said)"
end unreachable
for name in $(ls /containers | grep -v -e root -e unreachable); do
    start $name
    until [ -e /run/volumes/run/ready ]; do [ -n "$(pid $name)" ] || break; sleep 0.1; done
    echo "$name probe: $(probe $name)"
    echo "$name outside: $(web other)"
    echo "$name inside: $(web $name)"
    beside $name /usr/bin/cproxy check >/run/check
    echo "$name cgroup2: $(grep ' cgroup2 ' /run/check)"
    echo "$name attached: $(grep ' attached ' /run/check)"
    echo "$name warnings: $(grep ' WARN attached' /run/$name.log)"
    mounts='s/^[0-9]* [0-9]* [0-9:]* \([^ ]*\) \([^ ]*\) .* - cgroup2 .*/\1 at \2/p'
    inside="/usr/bin/nsenter --cgroup --target $(pid $name)"
    echo "$name mounts: $($inside sed -n "$mounts" /proc/$(pid $name)/mountinfo | tr '\n' ';')"
    end $name
done
poweroff -f
"#;

/// Container of the example.
fn example() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../images/kubernetes/overlays/sidecar/pod.yaml");
    let pod: Value = serde_saphyr::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let mut container = pod["spec"]["initContainers"][0].clone();
    container["volumes"] = pod["spec"]["volumes"].clone();
    container
}

fn words(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect()
}

/// A container's variable, with the kubelet's values of the pod's fields.
fn variable(variable: &Value) -> String {
    let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
        None => variable["value"].as_str().unwrap(),
        Some("spec.nodeName") => "virtual-kubelet",
        Some(path) => {
            assert_eq!(path, "status.podIP");
            "10.244.0.9"
        }
    };
    format!("{}={value}", variable["name"].as_str().unwrap())
}

/// A volume of the example at the kubelet's path for it, or at its hostPath.
fn volume(container: &Value, mount: &Value) -> Value {
    let name = mount["name"].as_str().unwrap();
    let volumes = container["volumes"].as_array().unwrap();
    let volume = volumes.iter().find(|volume| volume["name"] == name).unwrap();
    let source = volume["hostPath"]["path"].as_str().map_or_else(|| format!("/run/volumes/{name}"), str::to_owned);
    let options = json!(["rbind", "rprivate", if mount["readOnly"] == true { "ro" } else { "rw" }]);
    json!({"destination": mount["mountPath"], "type": "bind", "source": source, "options": options})
}

/// Default mounts of containerd and CRI-O for each container, without that of cgroups.
fn default_mounts() -> Value {
    let mount = |destination: &str, kind: &str, options: Value| {
        let source = kind;
        json!({"destination": destination, "type": kind, "source": source, "options": options})
    };
    json!([
        mount("/proc", "proc", json!(["nosuid", "noexec", "nodev"])),
        mount("/dev", "tmpfs", json!(["nosuid", "strictatime", "mode=755", "size=65536k"])),
        mount("/dev/pts", "devpts", json!(["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"])),
        mount("/dev/mqueue", "mqueue", json!(["nosuid", "noexec", "nodev"])),
        mount("/sys", "sysfs", json!(["nosuid", "noexec", "nodev", "ro"])),
        {
            "destination": "/var/run/secrets/kubernetes.io/serviceaccount", "type": "bind",
            "source": format!("/{ROOT}/{SECRETS}"), "options": ["rbind", "rprivate", "ro"],
        },
    ])
}

/// The mount of the container's own cgroup.
fn own_cgroup(access: &str) -> Value {
    let options = json!(["nosuid", "noexec", "nodev", "relatime", access]);
    json!({"destination": CGROUP, "type": "cgroup", "source": "cgroup", "options": options})
}

/// Configuration of the example's container as containerd (pkg/cri) writes it for cgroup v2. The pod shares the
/// machine's network. The container's own cgroup is mounted before the volumes.
fn config(name: &str, image: &OciImage) -> Value {
    let container = example();
    let security = &container["securityContext"];
    let capabilities =
        words(&security["capabilities"]["add"]).iter().map(|name| format!("CAP_{name}")).collect::<Vec<_>>();
    assert_eq!(security["capabilities"]["drop"], json!(["ALL"]));
    let memory = container["resources"]["limits"]["memory"].as_str().unwrap().strip_suffix("Mi").unwrap();
    let volumes = container["volumeMounts"].as_array().unwrap().iter().map(|mount| volume(&container, mount));
    let mut mounts = default_mounts().as_array().unwrap().clone();
    mounts.push(own_cgroup("ro"));
    mounts.extend(volumes);
    assert_eq!(container["command"], Value::Null, "it is the image's");
    let args = [words(&image.config["Entrypoint"]), words(&container["args"])].concat();
    let of_image = words(&image.config["Env"]).into_iter().map(str::to_owned);
    let env: Vec<_> = of_image.chain(container["env"].as_array().unwrap().iter().map(variable)).collect();
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": security["runAsUser"], "gid": 0},
            "args": args,
            "env": env,
            "cwd": "/",
            "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
            "noNewPrivileges": security["allowPrivilegeEscalation"] == false,
        },
        "root": {"path": format!("/{ROOT}"), "readonly": security["readOnlyRootFilesystem"]},
        "mounts": mounts,
        "linux": {
            "cgroupsPath": format!("/kubepods/pod-1/{name}"),
            "namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "cgroup"}],
            "resources": {
                "devices": [{"allow": false, "access": "rwm"}],
                "memory": {"limit": memory.parse::<u64>().unwrap() << 20},
                "cpu": {"shares": 10},
            },
            "maskedPaths": [
                "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi", "/sys/firmware",
            ],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    })
}

fn mounts(config: &mut Value) -> &mut Vec<Value> {
    config["mounts"].as_array_mut().unwrap()
}

/// The configuration with an agent that follows files, as there is no API server.
fn with_manifests(mut config: Value) -> Value {
    let variables = config["process"]["env"].as_array_mut().unwrap();
    let is_server = |name: &str| name.starts_with("CPROXY_APISERVER=") || name.starts_with("CPROXY_TLS_SERVER_NAME=");
    variables.retain(|variable| !is_server(variable.as_str().unwrap()));
    variables.push("CPROXY_MANIFESTS=/etc/cproxy/manifests".into());
    config
}

/// The configuration with the machine's cgroups at the runtime's path of the container's own. containerd then leaves
/// out its own mount.
fn with_replaced_cgroup(mut config: Value) -> Value {
    mounts(&mut config).retain(|mount| mount["destination"] != CGROUP);
    let volume = mounts(&mut config).iter_mut().find(|mount| mount["destination"] == OVERLAY).unwrap();
    volume["destination"] = CGROUP.into();
    config
}

/// The configuration of CRI-O in that case (`SpecAddMount`): the container's own cgroup replaces the machine's.
fn replaced(mut config: Value) -> Value {
    mounts(&mut config).retain(|mount| mount["destination"] != OVERLAY);
    config
}

/// The configuration of older versions in that case: the container's own cgroup is mounted over the machine's, and both
/// are listed.
fn with_covered_cgroup(config: Value) -> Value {
    let mut config = with_replaced_cgroup(config);
    mounts(&mut config).push(own_cgroup("ro"));
    config
}

/// The configuration of a privileged container in containerd: in the machine's cgroup namespace, and without a volume
/// of cgroups.
fn privileged(mut config: Value) -> Value {
    mounts(&mut config).retain(|mount| mount["destination"] != CGROUP && mount["destination"] != OVERLAY);
    mounts(&mut config).push(own_cgroup("rw"));
    config["linux"]["namespaces"].as_array_mut().unwrap().retain(|namespace| namespace["type"] != "cgroup");
    config["linux"]["resources"]["devices"] = json!([{"allow": true, "access": "rwm"}]);
    let all = ["BPF", "NET_ADMIN", "PERFMON", "SYS_ADMIN", "SYS_PTRACE", "DAC_OVERRIDE", "SYS_RESOURCE"];
    let all = json!(all.map(|name| format!("CAP_{name}")));
    config["process"]["capabilities"] = json!({"bounding": all, "effective": all, "permitted": all});
    config
}

fn guest<'s>(sandbox: &'s Sandbox, image: &OciImage) -> GuestImage<'s> {
    let web = http_service("web", VIP, [POD]);
    let authority = rcgen::generate_simple_self_signed(["elsewhere".to_owned()]).unwrap().cert.pem();
    let guest = GuestImage::new(sandbox, &Kernel::from_env())
        .memory_mib(512)
        .parameter("GUEST_INIT=/guest/new-root")
        .program("guest/new-root", NEW_ROOT)
        .program("guest/machine", MACHINE.replace("VIP", VIP))
        .unpack(&image.layer, ROOT)
        .file(&format!("{ROOT}/etc/cproxy/manifests/web.json"), manifest::list(web))
        .file(&format!("{ROOT}/{SECRETS}/token"), "token")
        .file(&format!("{ROOT}/{SECRETS}/ca.crt"), authority);
    let guest = PROGRAMS.map(Path::new).into_iter().fold(guest, GuestImage::program_of_host);
    let config = |name: &str| with_manifests(config(name, image));
    [
        ("unreachable", self::config("unreachable", image)),
        ("as-is", config("as-is")),
        ("in-its-place", with_replaced_cgroup(config("in-its-place"))),
        ("replaced", replaced(config("replaced"))),
        ("covered", with_covered_cgroup(config("covered"))),
        ("privileged", privileged(config("privileged"))),
    ]
    .into_iter()
    .fold(guest, |guest, (name, config)| guest.file(&format!("containers/{name}/config.json"), config.to_string()))
}

#[test]
fn the_sidecar_serves_other_containers_or_reports_that_it_cannot() {
    let sandbox = Sandbox::for_test();
    sandbox.add_address(POD);
    let _pod = http::serve(&sandbox, (POD, 8080), "pod-1");
    let console = guest(&sandbox, &OciImage::from_env()).start().wait_end(PATIENCE);
    // With single spaces, as columns are as wide as their longest value.
    let answer = |name: &str, what: &str| {
        let line = *values_of(&console, &format!("{name} {what}:")).first()?;
        Some(line.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let unreachable = answer("unreachable", "probe").unwrap_or_default();
    assert!(unreachable.starts_with("1 cproxy: not ready: the agent has received nothing"), "{console}");

    // The root and the container's own cgroup, as the container sees them.
    let (root, own) = ("/../../..", "/");
    for (name, mounts, place) in [
        ("as-is", format!("{own} at {CGROUP};{root} at {OVERLAY};"), OVERLAY),
        ("in-its-place", format!("{root} at {CGROUP};"), CGROUP),
        ("privileged", format!("{own} at {CGROUP};"), CGROUP),
    ] {
        assert_eq!(answer(name, "mounts"), Some(mounts), "{console}");
        assert_eq!(answer(name, "probe").as_deref(), Some(""), "{console}");
        for from in ["outside", "inside"] {
            assert_eq!(answer(name, from).as_deref(), Some("pod-1"), "{name}, {from}: {console}");
        }
        assert_eq!(answer(name, "cgroup2"), Some(format!("ok cgroup2 {place}")), "{console}");
        assert_eq!(answer(name, "attached"), Some(format!("ok attached to {place}")), "{console}");
        assert_eq!(answer(name, "warnings").as_deref(), Some(""), "{console}");
    }

    for (name, mounts) in
        [("replaced", format!("{own} at {CGROUP};")), ("covered", format!("{root} at {CGROUP};{own} at {CGROUP};"))]
    {
        assert_eq!(answer(name, "mounts"), Some(mounts), "{console}");
        assert_eq!(answer(name, "inside").as_deref(), Some("pod-1"), "{console}");
        assert_ne!(answer(name, "outside").as_deref(), Some("pod-1"), "{console}");
        for (what, words) in [
            ("probe", "cproxy: ready, attached to"),
            ("cgroup2", "degraded cgroup2"),
            ("attached", "degraded attached to"),
            ("warnings", "WARN attached to"),
        ] {
            let line = format!("{words} {CGROUP}, NOT the cgroup root, ");
            assert!(answer(name, what).unwrap().contains(&line), "{name}, {what}: {console}");
        }
    }
}
