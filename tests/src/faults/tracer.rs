//! A tracer of one agent and the processes that it starts, on a thread of its own. A seccomp filter stops them at the
//! calls that are recorded, and nowhere else.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Command, ExitStatus},
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread::{self, JoinHandle},
};

use nix::{
    errno::Errno,
    sys::{
        ptrace::{self, Options},
        signal::{Signal, kill},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

use super::{BpfObject, Call, Fault, Injection, Site, call};
use crate::seccomp;

/// State that the tracer shares with the test.
#[derive(Debug)]
pub(super) struct Shared(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    calls: Vec<Call>,
    made: BTreeSet<BpfObject>,
    injection: Option<Injection>,
    /// Calls at the injection's site so far.
    seen: usize,
    was_hit: bool,
    exit_status: Option<ExitStatus>,
}

impl Shared {
    pub(super) fn new(injection: Option<Injection>) -> Self {
        Self(Mutex::new(State { injection, ..State::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn arm(&self, injection: Injection) {
        let mut state = self.lock();
        (state.injection, state.seen, state.was_hit) = (Some(injection), 0, false);
    }

    pub(super) fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.lock().calls)
    }

    pub(super) fn call_count(&self) -> usize {
        self.lock().calls.len()
    }

    pub(super) fn made(&self) -> BTreeSet<BpfObject> {
        self.lock().made.clone()
    }

    pub(super) fn was_hit(&self) -> bool {
        self.lock().was_hit
    }

    pub(super) fn exit_status(&self) -> Option<ExitStatus> {
        self.lock().exit_status
    }

    /// Records a call. Returns the fault at it.
    fn record(&self, call: Call) -> Option<Fault> {
        let mut state = self.lock();
        let is_at = |injection: &Injection| injection.site.as_ref().is_none_or(|site| *site == call.site);
        let (is_at_site, errors) = (state.injection.as_ref().is_some_and(is_at), call.errors);
        state.calls.push(call);
        if !is_at_site || state.was_hit {
            return None;
        }
        state.seen += 1;
        let injection = state.injection.clone().filter(|injection| injection.number == state.seen)?;
        state.was_hit = true;
        Some(match injection.fault {
            Fault::AnyError(number) => Fault::Error(errors.iter().copied().cycle().nth(number)?),
            fault => fault,
        })
    }
}

/// Starts a command and traces it. Returns the tracer's thread, which ends with the last traced process, and the
/// process.
///
/// # Panics
/// When the command cannot be started.
pub(super) fn spawn(
    mut command: Command,
    directory: String,
    shared: Arc<Shared>,
) -> (JoinHandle<()>, rustix::process::Pid) {
    let (sender, receiver) = mpsc::channel();
    // Only the thread that has started a process may trace it.
    let thread = thread::spawn(move || {
        let filter = seccomp::tracing_filter(call::TRACED);
        let trace_me = move || {
            ptrace::traceme()?;
            seccomp::load(&filter, 0).map(drop)
        };
        // SAFETY: between fork and exec the closure makes two system calls, and allocates nothing.
        unsafe { command.pre_exec(trace_me) };
        #[expect(clippy::zombie_processes, reason = "the tracer waits for all processes")]
        let child = command.spawn().unwrap_or_else(|error| panic!("cannot start the agent: {error}"));
        let root = Pid::from_raw(child.id().cast_signed());
        // The process has stopped after exec(2).
        waitpid(root, None).expect("cannot wait for a child");
        let options = Options::PTRACE_O_TRACESECCOMP
            | Options::PTRACE_O_TRACECLONE
            | Options::PTRACE_O_TRACEFORK
            | Options::PTRACE_O_TRACEVFORK
            | Options::PTRACE_O_TRACEEXEC
            | Options::PTRACE_O_TRACESYSGOOD
            | Options::PTRACE_O_EXITKILL;
        ptrace::setoptions(root, options).expect("cannot trace a child");
        sender.send(rustix::process::Pid::from_child(&child)).expect("the receiver waits");
        resume(root, None);
        Tracer {
            root,
            directory,
            shared,
            known: BTreeSet::from([root]),
            dying: BTreeMap::new(),
            making: BTreeSet::new(),
        }
        .run();
    });
    let pid = receiver.recv().expect("the agent cannot be traced");
    (thread, pid)
}

/// Lets a thread run on. It may have been killed since.
fn resume(thread: Pid, signal: Option<Signal>) {
    ptrace::cont(thread, signal).ok();
}

struct Tracer {
    root: Pid,
    /// The sandbox's directory.
    directory: String,
    shared: Arc<Shared>,
    /// Threads that have stopped before.
    known: BTreeSet<Pid>,
    /// Threads whose process is killed after their present call, and that process.
    dying: BTreeMap<Pid, Pid>,
    /// Threads whose present call makes an object.
    making: BTreeSet<Pid>,
}

impl Tracer {
    /// Runs until all processes have ended.
    fn run(mut self) {
        loop {
            // Other threads have children, too.
            match waitpid(None, Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD)) {
                Err(Errno::ECHILD) => return,
                Err(_) => {}
                Ok(WaitStatus::Exited(pid, code)) => self.end(pid, ExitStatus::from_raw(code << 8)),
                Ok(WaitStatus::Signaled(pid, signal, _)) => self.end(pid, ExitStatus::from_raw(signal as i32)),
                Ok(WaitStatus::PtraceEvent(thread, _, event)) => {
                    self.known.insert(thread);
                    if event == libc::PTRACE_EVENT_SECCOMP {
                        self.handle(thread).ok();
                    } else {
                        resume(thread, None);
                    }
                }
                Ok(WaitStatus::PtraceSyscall(thread)) => {
                    if self.making.remove(&thread)
                        && let Some(object) = made_object(thread)
                    {
                        self.shared.lock().made.insert(object);
                    }
                    match self.dying.remove(&thread) {
                        Some(process) => drop(kill(process, Signal::SIGKILL)),
                        None => resume(thread, None),
                    }
                }
                // A thread begins with a stop.
                Ok(WaitStatus::Stopped(thread, Signal::SIGSTOP)) if self.known.insert(thread) => resume(thread, None),
                Ok(WaitStatus::Stopped(thread, signal)) => resume(thread, Some(signal)),
                Ok(_) => {}
            }
        }
    }

    fn end(&mut self, pid: Pid, status: ExitStatus) {
        self.known.remove(&pid);
        self.dying.remove(&pid);
        self.making.remove(&pid);
        if pid == self.root {
            self.shared.lock().exit_status = Some(status);
        }
    }

    /// Handles a stop before a call.
    fn handle(&mut self, thread: Pid) -> nix::Result<()> {
        let mut registers = ptrace::getregs(thread)?;
        let process = process_of(thread).unwrap_or(thread);
        let arguments = [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9];
        let fault = call::describe(thread, registers.orig_rax.cast_signed(), arguments, &self.directory).and_then(
            |(text, errors)| {
                let site = if process == self.root { text } else { format!("child {text}") };
                self.shared.record(Call { site: Site(site), errors })
            },
        );
        if registers.orig_rax.cast_signed() == libc::SYS_bpf && call::makes_object(registers.rdi) {
            self.making.insert(thread);
        }
        match fault {
            None | Some(Fault::AnyError(_)) if self.making.contains(&thread) => ptrace::syscall(thread, None)?,
            None | Some(Fault::AnyError(_)) => resume(thread, None),
            Some(Fault::KillBefore) => kill(process, Signal::SIGKILL)?,
            Some(Fault::KillAfter) => {
                self.dying.insert(thread, process);
                ptrace::syscall(thread, None)?;
            }
            Some(Fault::Error(error)) => {
                self.making.remove(&thread);
                // A negative number makes the kernel skip the call (kernel/seccomp.c).
                registers.orig_rax = u64::MAX;
                registers.rax = i64::from(-error).cast_unsigned();
                ptrace::setregs(thread, registers)?;
                resume(thread, None);
            }
        }
        Ok(())
    }
}

/// The object that a call of bpf(2) has just made.
fn made_object(thread: Pid) -> Option<BpfObject> {
    let descriptor = ptrace::getregs(thread).ok()?.rax.cast_signed();
    let information = std::fs::read_to_string(format!("/proc/{thread}/fdinfo/{descriptor}")).ok()?;
    let id = |name: &str| information.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    // A link names its program, too.
    let link = id("link_id:").map(BpfObject::Link);
    link.or_else(|| id("prog_id:").map(BpfObject::Program)).or_else(|| id("map_id:").map(BpfObject::Map))
}

/// Process of a thread.
fn process_of(thread: Pid) -> io::Result<Pid> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status"))?;
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok());
    process.map(Pid::from_raw).ok_or_else(|| io::Error::other("a thread without a process"))
}
