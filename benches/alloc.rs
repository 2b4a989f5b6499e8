//! `cargo bench --bench alloc`: the pool against floors, general allocators and other pools. The same
//! contest as `pinpool bench alloc|churn|handoff|threads`, all of it in one run.
//! `-- --help` says how to have less of it.
#![allow(clippy::print_stdout, clippy::print_stderr)]
// Without a harness the modules' unit tests are compiled here too, and nothing calls them.
#![cfg_attr(test, allow(dead_code, unused_imports))]

#[path = "../src/bin/pinpool/bench/contest/mod.rs"]
mod contest;

use std::{env, process::ExitCode};

use contest::{Group, METHOD, Options};

const GROUPS: [Group; 4] = [Group::Alloc, Group::Churn, Group::Handoff, Group::Threads];
const USAGE: &str = "\
cargo bench --bench alloc --features rivals -- [GROUP..] [--json] [--quick] [--reps N]
                                               [--case NAME,..] [--contender NAME,..]
GROUP: alloc, churn, handoff, threads; all of them unless named
";

fn main() -> ExitCode {
    match contest::served().and_then(|served| if served { Ok(()) } else { run() }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

struct Asked {
    groups: Vec<Group>,
    options: Options,
    json: bool,
}

/// Reads the arguments, to which cargo adds `--bench`; `None` if help is asked for.
fn read(mut args: impl Iterator<Item = String>) -> Result<Option<Asked>, String> {
    let mut groups = Vec::new();
    let (mut reps, mut quick, mut json) = (None, false, false);
    let (mut cases, mut contenders) = (Vec::new(), Vec::new());
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        let list = |text: String| text.split(',').map(str::to_owned).collect::<Vec<_>>();
        match arg.as_str() {
            "--bench" => {}
            "--help" => return Ok(None),
            "--json" => json = true,
            "--quick" => quick = true,
            "--reps" => reps = Some(value()?.parse().map_err(|e| format!("--reps: {e}"))?),
            "--case" => cases.extend(list(value()?)),
            "--contender" => contenders.extend(list(value()?)),
            name => match GROUPS.iter().find(|g| g.name() == name) {
                Some(group) => groups.push(*group),
                None => return Err(format!("{name}: not known here; see --help")),
            },
        }
    }
    if groups.is_empty() {
        groups = GROUPS.to_vec();
    }
    let reps = reps.unwrap_or(Options::default_reps(quick));
    Ok(Some(Asked { groups, options: Options { reps, quick, cases, contenders }, json }))
}

fn run() -> Result<(), String> {
    let Some(asked) = read(env::args().skip(1))? else {
        println!("{USAGE}\n{METHOD}");
        return Ok(());
    };
    let mut last = String::new();
    let progress = |what: &str, _: f64| {
        if what != last {
            eprintln!("{what}");
            what.clone_into(&mut last);
        }
        true
    };
    let report = contest::run(&asked.groups, &asked.options, progress)?;
    if asked.json {
        println!("{}", report.json());
    } else {
        println!("{}", report.text());
    }
    Ok(())
}
