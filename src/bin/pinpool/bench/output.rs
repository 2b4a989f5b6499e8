//! What is made of benches' results, by the flags that all of them share: text, JSON or CSV on stdout,
//! plots and one HTML report in folders, a comparison with an older report.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use super::{
    compare::{Comparison, Old},
    csv,
    facts::Environment,
    figures::Section,
    html, plot,
};
use crate::cli::{Failure, emit, say};

/// What closes each bench's help.
pub(super) const NOTE: &str = "\
An interrupt (Ctrl-C) ends it early: what was measured until then is shown, and marked as partial.

Exit code: 0 all went well; 1 something failed; 2 wrong call or no such device; 130 interrupted.";

// The flags of all benches. (No doc comment: clap would take it for the command's.)
#[derive(clap::Args)]
#[command(next_help_heading = "Output")]
pub(super) struct Output {
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Print the figures as CSV instead of tables
    #[arg(long, conflicts_with = "json")]
    csv: bool,
    /// Draw each figure as an SVG file in this folder
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    /// Write one report with all plots and tables, index.html in this folder
    #[arg(long, value_name = "DIR")]
    html: Option<PathBuf>,
    /// Fewer and shorter samples: about a minute for all benches, less sure figures
    #[arg(long)]
    quick: bool,
    /// Say what got slower since this output of --json, on the same machine
    #[arg(long, value_name = "OLD.json")]
    compare: Option<PathBuf>,
}

impl Output {
    /// Makes folders and reads the old report, before anything is measured.
    pub(super) fn ready(self) -> Result<Ready, Failure> {
        for dir in [&self.plot, &self.html].into_iter().flatten() {
            fs::create_dir_all(dir).map_err(|e| {
                Failure::Usage(format!("the folder {} cannot be made: {e}", dir.display()))
            })?;
        }
        let old = self.compare.as_deref().map(Old::read).transpose().map_err(Failure::Usage)?;
        Ok(Ready { flags: self, old })
    }
}

/// [`Output`], ready for results.
pub(super) struct Ready {
    flags: Output,
    old: Option<Old>,
}

impl Ready {
    /// Whether less is to be measured.
    pub(super) fn quick(&self) -> bool {
        self.flags.quick
    }

    /// Hands one bench's result out.
    pub(super) fn one(&self, section: Section) -> Result<(), Failure> {
        let all = std::slice::from_ref(&section);
        self.files(all, &[])?;
        self.print(all, section.object.clone(), &[])
    }

    /// Hands several benches' results out; `missing` did not run.
    pub(super) fn all(&self, sections: &[Section], missing: &[&str]) -> Result<(), Failure> {
        self.files(sections, missing)?;
        let environment = Environment::read();
        let mut object = json!({
            "bench": super::all::NAME,
            "kernel": environment.kernel,
            "cpu": environment.cpu,
            "cpus": environment.cpus,
            "quick": self.flags.quick,
        });
        if !missing.is_empty() || sections.iter().any(|s| s.partial) {
            object["partial"] = true.into();
            object["missing"] = json!(missing);
        }
        object["benches"] = sections.iter().map(|s| s.object.clone()).collect();
        self.print(sections, object, missing)
    }

    /// Writes plots and the report, as far as they are asked for. `missing` has not run, or not yet.
    pub(super) fn files(&self, sections: &[Section], missing: &[&str]) -> Result<(), Failure> {
        let write = |dir: &Path, name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text)
                .map_err(|e| Failure::Failed(format!("{} cannot be written: {e}", path.display())))
        };
        let mut plots = Vec::new();
        if self.flags.plot.is_some() || self.flags.html.is_some() {
            for section in sections {
                let drawn = section.panels.iter().filter(|p| !p.points.is_empty());
                let drawn = drawn.map(|panel| Ok((panel, plot::svg(section, panel)?)));
                plots.push(drawn.collect::<Result<Vec<_>, String>>().map_err(Failure::Failed)?);
            }
        }
        if let Some(dir) = &self.flags.plot {
            for (section, plots) in sections.iter().zip(&plots) {
                for (panel, svg) in plots {
                    write(dir, &format!("{}-{}.svg", section.name, panel.id), svg)?;
                }
            }
        }
        if let Some(dir) = &self.flags.html {
            let comparison = self.compared(sections);
            let page = html::page(sections, &plots, missing, comparison.as_ref());
            write(dir, "index.html", &page)?;
        }
        Ok(())
    }

    fn compared(&self, sections: &[Section]) -> Option<Comparison> {
        self.old.as_ref().map(|old| old.compare(sections))
    }

    /// Prints in the form that was asked for, and says what went wrong.
    fn print(
        &self,
        sections: &[Section],
        mut object: Value,
        missing: &[&str],
    ) -> Result<(), Failure> {
        let partial = partial(sections, missing);
        let comparison = self.compared(sections);
        if self.flags.json {
            if let Some(comparison) = &comparison {
                object["comparison"] = comparison.json();
            }
            emit(&object.to_string())?;
        } else if self.flags.csv {
            emit(&csv::rows(sections).map_err(Failure::Failed)?)?;
            comparison.iter().flat_map(Comparison::lines).for_each(|line| say(&line));
        } else {
            let titled = |s: &Section| match sections.len() {
                1 => s.text.trim_end().to_owned(),
                _ => format!("== {} ==\n\n{}", s.name, s.text.trim_end()),
            };
            let comparison = comparison.map(|c| c.lines().join("\n"));
            let parts: Vec<String> = partial
                .clone()
                .into_iter()
                .chain(sections.iter().map(titled))
                .chain(comparison)
                .collect();
            emit(&parts.join("\n\n"))?;
        }
        let failures: Vec<&String> = sections.iter().flat_map(|s| &s.failures).collect();
        match (partial, failures.as_slice()) {
            (Some(_), failures) => {
                failures.iter().for_each(|f| say(f));
                Err(Failure::Interrupted)
            }
            (None, []) => Ok(()),
            (None, [rest @ .., last]) => {
                rest.iter().for_each(|f| say(f));
                Err(Failure::Failed((*last).clone()))
            }
        }
    }
}

/// Says that a report is partial, and what it lacks, if it does.
pub(super) fn partial(sections: &[Section], missing: &[&str]) -> Option<String> {
    let cut: Vec<&str> = sections.iter().filter(|s| s.partial).map(|s| s.name).collect();
    let cut = (!cut.is_empty()).then(|| format!("{} ended early", cut.join(", ")));
    let missing = (!missing.is_empty()).then(|| format!("not run: {}", missing.join(", ")));
    let why: Vec<String> = [cut, missing].into_iter().flatten().collect();
    (!why.is_empty()).then(|| format!("PARTIAL REPORT: {}", why.join("; ")))
}
