//! System calls that another process is made to make, as if somebody ran code in it.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::FileExt,
};

use nix::{
    sys::{
        ptrace,
        wait::{WaitStatus, waitpid},
    },
    unistd::Pid,
};

/// Bytes below the stack that functions may use without moving it (System V ABI, "red zone"), and some more.
const UNUSED_BYTES: u64 = 8 << 10;

/// Argument of a call.
#[derive(Clone, Copy, Debug)]
pub enum Argument<'t> {
    /// Number.
    Number(i64),
    /// Text, of which the call gets the address.
    Text(&'t str),
}

/// A process that has stopped until this is dropped: its main thread, which waited in a system call.
#[derive(Debug)]
pub struct Stopped {
    process: Pid,
    memory: File,
}

impl Stopped {
    /// Stops a process.
    ///
    /// # Panics
    /// When it cannot be traced.
    pub fn new(pid: u32) -> Self {
        let process = Pid::from_raw(pid.cast_signed());
        ptrace::attach(process).expect("the process cannot be traced");
        wait_for_stop(process);
        let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"));
        Self { process, memory: memory.expect("the memory of a traced process") }
    }

    /// Makes a call, and returns what it returns: a negative number is an error.
    ///
    /// # Panics
    /// When the thread was not in a system call, or ends.
    pub fn call(&self, number: libc::c_long, arguments: &[Argument<'_>]) -> i64 {
        let before = ptrace::getregs(self.process).expect("the registers of a stopped thread");
        let mut free = before.rsp - UNUSED_BYTES;
        let mut values = [0; 6];
        for (value, argument) in values.iter_mut().zip(arguments) {
            *value = match argument {
                Argument::Number(number) => number.cast_unsigned(),
                Argument::Text(text) => {
                    free -= text.len() as u64 + 1;
                    let bytes = [text.as_bytes(), b"\0"].concat();
                    self.memory.write_all_at(&bytes, free).expect("the stack can be written");
                    free
                }
            };
        }
        let mut instruction = [0; 2];
        self.memory.read_exact_at(&mut instruction, before.rip - 2).expect("the code can be read");
        assert_eq!(instruction, [0x0f, 0x05], "the thread was not in a system call");
        let mut registers = before;
        // No call is to be restarted.
        registers.orig_rax = u64::MAX;
        registers.rax = number.cast_unsigned();
        registers.rip -= 2;
        [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9] = values;
        ptrace::setregs(self.process, registers).expect("the registers of a stopped thread");
        ptrace::step(self.process, None).expect("a stopped thread can go on");
        wait_for_stop(self.process);
        let after = ptrace::getregs(self.process).expect("the registers of a stopped thread");
        ptrace::setregs(self.process, before).expect("the registers of a stopped thread");
        after.rax.cast_signed()
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        ptrace::detach(self.process, None).ok();
    }
}

fn wait_for_stop(process: Pid) {
    match waitpid(process, None).expect("a traced process can be waited for") {
        WaitStatus::Stopped(..) => {}
        other => panic!("the traced process: {other:?}"),
    }
}
