//! Programs that others detach, with no change of the network or of a cgroup that would have the agent look.

use std::os::fd::AsFd;

use cproxy_datapath::bpf::{
    PinDir, Program,
    syscalls::{link_detach, obj_get},
};
use cproxy_tests::sandbox::Sandbox;

fn detach_all(sandbox: &Sandbox) {
    let pins = PinDir::new(&sandbox.pin_dir());
    for program in Program::ALL {
        let link = obj_get(&pins.object(program.link), 0).unwrap();
        link_detach(link.as_fd()).unwrap();
    }
}

mod long {
    use std::{
        thread,
        time::{Duration, Instant},
    };

    use cproxy_tests::{
        echo,
        manifest::Service,
        process::{cproxy, eventually},
        world::counter,
    };

    use super::*;
    use crate::fixture::{Cluster, PATIENCE};

    const VIP: &str = "10.96.0.10:80";
    const WEB: &str = "TCP 10.96.0.10:80 10.244.0.1:8080";

    /// The agent looks again at the first confirmation after this time.
    const INTERVAL: Duration = Duration::from_secs(60);
    /// Limit on the time until then: bookmarks come each minute, and one may come a little too early.
    const LOOK_MAX: Duration = Duration::from_secs(180);
    /// Number of attempts, each of which ends early if somebody else makes a cgroup beside the sandbox's.
    const ATTEMPTS: usize = 5;

    /// Detaches all programs just after a look. Returns the time until they were attached again.
    fn time_until_attached(cluster: &Cluster<'_>) -> Duration {
        let sandbox = cluster.sandbox;
        // This has the agent look.
        cproxy(sandbox, &["check"]);
        let start = Instant::now();
        let counts = || ["hook_checks", "hook_repairs"].map(|name| counter(sandbox, name));
        let [looks, repairs] = counts();
        detach_all(sandbox);
        echo::ask_name(VIP).expect_err("a connection without the programs");
        // The API server sends no bookmark if nothing has changed. The agent does not see a headless Service.
        let mut number = 0;
        eventually(LOOK_MAX, "the programs are attached again", || {
            let asked = echo::ask_name(VIP);
            if asked.is_err() {
                number += 1;
                cluster.apply(Service::new("unseen").cluster_ips(["None"]).tcp("http", 80, number));
                thread::sleep(Duration::from_secs(1));
            }
            asked.map(drop)
        });
        let took = start.elapsed();
        eventually(PATIENCE, "the look is over", || match counts() {
            now if now == [looks + 1, repairs + 1] => Ok(()),
            now => Err(format!("{now:?} after {:?}", [looks, repairs])),
        });
        took
    }

    #[test]
    fn programs_that_are_detached_are_attached_again_after_the_next_bookmark() {
        let sandbox = Sandbox::for_test();
        let cluster = Cluster::shared(&sandbox);
        cluster.apply_service("web", "10.96.0.10", &["10.244.0.1"]);
        let mut agent = cluster.start_agent();
        cluster.expect(&[WEB]);
        let mut times = (0..ATTEMPTS).map(|_| time_until_attached(&cluster));
        let took = times.find(|took| *took > INTERVAL - Duration::from_secs(1));
        println!("the programs were attached again after {:?}", took.expect("something else had the agent look"));
        let line = agent.wait_log("attaching the programs again", PATIENCE);
        for program in Program::ALL {
            assert!(line.contains(&format!("{}: it was detached", program.link)), "{line}");
        }
        cluster.expect(&[WEB]);
        assert_eq!(agent.exit_status(), None, "it is still the same agent");
    }
}
