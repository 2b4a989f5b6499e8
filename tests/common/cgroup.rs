//! A control group of a test's own, on whichever hierarchy has the controller, and processes in it. Takes
//! root.
#![allow(dead_code, unreachable_pub)] // each test program uses a part

use std::{
    env, fs,
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

/// Removed when dropped; by then the processes in it have to be gone.
pub struct Cgroup {
    dir: PathBuf,
    pub v2: bool,
    /// What this mounted to get at it.
    mounted: Option<PathBuf>,
}

impl Cgroup {
    /// Makes one that has a controller, or says why it cannot.
    pub fn new(controller: &str) -> Result<Self, String> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!("pinpool-test-{}-{}", std::process::id(), MADE.fetch_add(1, Relaxed));
        let made = |dir: PathBuf, v2, mounted| {
            let this = Self { dir, v2, mounted };
            fs::create_dir(&this.dir).map_err(|e| format!("{}: {e}", this.dir.display()))?;
            Ok(this)
        };
        for top in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new) {
            let listed = fs::read_to_string(top.join("cgroup.controllers")).unwrap_or_default();
            if listed.split_whitespace().any(|c| c == controller) {
                fs::write(top.join("cgroup.subtree_control"), format!("+{controller}"))
                    .map_err(|e| format!("{}: {e}", top.display()))?;
                return made(top.join(name), true, None);
            }
        }
        let top = Path::new("/sys/fs/cgroup").join(controller);
        if top.join("cgroup.procs").exists() {
            return made(top.join(name), false, None);
        }
        let top = env::temp_dir().join(&name);
        fs::create_dir(&top).map_err(|e| e.to_string())?;
        let mut mount = Command::new("mount");
        mount.args(["-t", "cgroup", "-o", controller, "none"]).arg(&top);
        if !mount.output().is_ok_and(|o| o.status.success()) {
            let _ = fs::remove_dir(&top);
            return Err(format!("no hierarchy has the controller {controller}"));
        }
        made(top.join("test"), false, Some(top))
    }

    /// One inside this, which takes its processes; v2 only. `controllers` are those that it has.
    pub fn inner(&self, controllers: &[&str]) -> Self {
        for c in controllers {
            self.set("cgroup.subtree_control", &format!("+{c}"));
        }
        let dir = self.dir.join("inner");
        fs::create_dir(&dir).expect("a group inside");
        Self { dir, v2: self.v2, mounted: None }
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    #[track_caller]
    pub fn set(&self, file: &str, value: &str) {
        fs::write(self.file(file), value).unwrap_or_else(|e| panic!("{file} = {value}: {e}"));
    }

    /// The file that limits a resource: `"memory"`, `"hugetlb.2MB"`.
    pub fn limit_file(&self, resource: &str) -> String {
        format!("{resource}.{}", if self.v2 { "max" } else { "limit_in_bytes" })
    }

    #[track_caller]
    pub fn limit(&self, resource: &str, bytes: usize) {
        self.set(&self.limit_file(resource), &bytes.to_string());
    }

    /// Runs a command in it, to its end.
    pub fn run(&self, command: &mut Command) -> Output {
        let open = fs::OpenOptions::new().write(true).open(self.file("cgroup.procs"));
        let mut processes = open.expect("the list of processes");
        // SAFETY: one write of a constant, which neither allocates nor locks. "0" is whoever writes.
        unsafe { command.pre_exec(move || processes.write_all(b"0")) };
        command.output().expect("run")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A panic here would hide the test's own.
        let _ = fs::remove_dir(&self.dir);
        if let Some(top) = &self.mounted {
            let _ = Command::new("umount").arg(top).status();
            let _ = fs::remove_dir(top);
        }
    }
}

/// This test program again, for one test, which finds `variable` set to `value`.
pub fn again(test: &str, variable: &str, value: &str) -> Command {
    let mut command = Command::new(env::current_exe().expect("own path"));
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(variable, value);
    command
}

/// Holds a child that [`again`] made to having run its test, and to no signal.
#[track_caller]
pub fn passed(out: &Output) {
    use std::os::unix::process::ExitStatusExt;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let said = format!("{}\n{}", text(&out.stdout), text(&out.stderr));
    assert_eq!(out.status.signal(), None, "{said}");
    assert!(out.status.success(), "{}: {said}", out.status);
    assert!(said.contains("1 passed"), "the child ran the test: {said}");
}

/// The command between the first back quotes of a remedy.
pub fn command_in(fix: &str) -> &str {
    fix.split('`').nth(1).unwrap_or_else(|| panic!("no command in {fix:?}"))
}
