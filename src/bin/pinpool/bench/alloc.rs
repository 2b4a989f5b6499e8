//! `pinpool bench alloc|handoff|churn|threads`: the pool against floors, general allocators and other
//! pools. What is measured and how is in `contest/`.

use super::{
    contest::{self, Group, METHOD, Options},
    interrupted,
    report::{self, Progress},
};
use crate::cli::{Failure, say};

/// Which cases to run and how long.
#[derive(clap::Args)]
#[command(after_long_help = METHOD)]
pub(crate) struct Args {
    /// Repetitions for each contender and case [default: 11, with --quick 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    reps: Option<u16>,
    /// Shorter repetitions and fewer of them, to see that it works
    #[arg(long)]
    quick: bool,
    /// Only these cases
    #[arg(long = "case", value_name = "NAME,..", value_delimiter = ',')]
    cases: Vec<String>,
    /// Only these contenders; ratios are to what is among them
    #[arg(long = "contender", value_name = "NAME,..", value_delimiter = ',')]
    contenders: Vec<String>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
}

/// Measures one group of cases and prints the result.
pub(crate) fn run(group: Group, args: &Args) -> Result<(), Failure> {
    if contest::served().map_err(Failure::Failed)? {
        return Ok(());
    }
    let options = Options {
        reps: args.reps.map_or_else(|| Options::default_reps(args.quick), usize::from),
        quick: args.quick,
        cases: args.cases.clone(),
        contenders: args.contenders.clone(),
    };
    options.check(&[group]).map_err(Failure::Usage)?;
    let progress = Progress::new(1);
    let step = |what: &str, share: f64| {
        progress.at(what);
        progress.share(share);
        !interrupted()
    };
    let found = contest::run(&[group], &options, step).map_err(Failure::Failed)?;
    drop(progress);
    let found = found.ok_or(Failure::Interrupted)?;
    if !cfg!(feature = "rivals") {
        say("built without the feature `rivals`: most other allocators are left out");
    }
    report::emit(&if args.json { found.json().to_string() } else { found.text() })
}
