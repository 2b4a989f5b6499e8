//! A second process for tests that need one: this test program again, told by the environment which part to
//! play, spoken with line by line.
#![allow(dead_code, clippy::unwrap_used)]

use std::{
    env,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

const ROLE: &str = "PINPOOL_TEST_ROLE";
/// Before each line that a helper says, for the test runner prints lines of its own.
const MARK: &str = "helper says: ";

/// The other process, as its test sees it. Killed when dropped.
pub(crate) struct Helper {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Helper {
    /// Starts this program as one test alone, which must call [`role`].
    pub(crate) fn start(test: &str, role: &str) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let to = child.stdin.take().unwrap();
        let from = BufReader::new(child.stdout.take().unwrap());
        Self { child, to, from }
    }

    pub(crate) fn say(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    /// The next line that it says; fails if it ends instead.
    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.from.read_line(&mut line).unwrap(), 0, "the helper ended");
            if let Some((_, said)) = line.split_once(MARK) {
                return said.trim_end().to_owned();
            }
        }
    }

    /// Says a line and returns the answer.
    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.hear()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until it ends by itself, and checks that all was well.
    pub(crate) fn end(mut self) {
        let mut rest = String::new();
        while self.from.read_line(&mut rest).unwrap() > 0 {}
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {rest}");
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In the helper: its role; `None` in the test itself.
pub(crate) fn role() -> Option<String> {
    env::var(ROLE).ok()
}

/// In the helper: says a line.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{MARK}{line}").unwrap();
    out.flush().unwrap();
}

/// In the helper: the next line that it is told; `None` at the end.
pub(crate) fn hear() -> Option<String> {
    let mut line = String::new();
    let n = std::io::stdin().read_line(&mut line).unwrap();
    (n > 0).then(|| line.trim_end().to_owned())
}
