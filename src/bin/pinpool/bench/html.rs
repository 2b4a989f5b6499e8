//! The report: one HTML file with everything in it, plots included.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::{
    compare::Comparison,
    figures::{Panel, Point, Section},
    output,
};

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:1100px;margin:2em auto;padding:0 1em}\
h1{font-size:1.6em}h2{margin-top:2.2em;border-bottom:1px solid #ddd}h3{font-size:1.05em;margin:1.8em 0 .4em}\
svg{max-width:100%;height:auto;border:1px solid #e4e4e4}\
.table{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}\
th,td{padding:.25em .8em;text-align:right;white-space:nowrap;border-bottom:1px solid #eee}\
th:first-child,td:first-child{text-align:left}thead th{border-bottom:1px solid #999}\
td small,th small{display:block;color:#777;font-weight:400}.place,.note{color:#666}.bad{color:#b3001b;font-weight:600}\
pre{background:#f6f6f6;padding:1em;overflow-x:auto;font-size:13px;line-height:1.35}";

/// Sections with their panels' pictures; `missing` did not run, or not yet.
pub(super) fn page(
    sections: &[Section],
    plots: &[Vec<(&Panel, String)>],
    missing: &[&str],
    comparison: Option<&Comparison>,
) -> String {
    let title = match sections {
        [one] if missing.is_empty() => format!("pinpool bench {}", one.name),
        _ => "pinpool bench".to_owned(),
    };
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (title) }
                @if let Some(partial) = output::partial(sections, missing) {
                    p.bad { (partial) }
                }
                @if sections.len() > 1 {
                    ul {
                        @for section in sections {
                            li { a href={ "#" (section.name) } { (section.name) } }
                        }
                    }
                }
                @if let Some(comparison) = comparison {
                    (compared(comparison))
                }
                @for (section, plots) in sections.iter().zip(plots) {
                    (part(section, plots))
                }
            }
        }
    }
    .into_string()
}

fn part(section: &Section, plots: &[(&Panel, String)]) -> Markup {
    html! {
        h2 id=(section.name) { (section.name) }
        @if section.failures.is_empty() || !section.panels.is_empty() {
            p.place { (section.place()) }
        }
        @for failure in &section.failures {
            p.bad { (failure) }
        }
        @for (panel, svg) in plots {
            h3 { (panel.title) }
            (PreEscaped(svg))
            (table(panel))
        }
        details {
            summary { "As it was printed" }
            pre { (section.text.trim_end()) }
        }
        @if !section.method.is_empty() {
            details {
                summary { "Method and bias" }
                @for paragraph in section.method.split("\n\n") {
                    p.note { (paragraph) }
                }
            }
        }
    }
}

/// A part of a point, and its name.
type Part = (&'static str, fn(&Point) -> Option<f64>);

/// Contenders by places: medians, and below each its spread.
fn table(panel: &Panel) -> Markup {
    let places = panel.places();
    let show = |v| panel.unit.show(v);
    let has = |part: fn(&Point) -> Option<f64>| panel.points.iter().any(|p| part(p).is_some());
    let below: &[Part] = match () {
        () if has(|p| p.p999) => &[("min", |p| p.min), ("p99", |p| p.p99), ("p99.9", |p| p.p999)],
        () if has(|p| p.p99) => &[("min", |p| p.min), ("p99", |p| p.p99)],
        () if has(|p| p.min) => &[("min", |p| p.min), ("max", |p| p.max)],
        () => &[],
    };
    html! {
        div.table {
            table {
                thead {
                    tr {
                        th {
                            "median"
                            @for (name, _) in below {
                                small { (name) }
                            }
                        }
                        @for &place in &places {
                            th { (panel.axis.show(place)) }
                        }
                    }
                }
                tbody {
                    @for name in panel.contenders() {
                        tr {
                            td { (name) }
                            @for &place in &places {
                                td {
                                    @if let Some(point) = panel.at(name, place) {
                                        (panel.unit.show(point.median))
                                        @for (_, part) in below {
                                            small { (part(point).map_or("–".to_owned(), show)) }
                                        }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn compared(comparison: &Comparison) -> Markup {
    html! {
        h2 id="comparison" { "Comparison" }
        p { (comparison.summary()) }
        @if comparison.rows().next().is_some() {
            div.table {
                table {
                    thead { tr { @for head in Comparison::HEADS { th { (head) } } } }
                    tbody {
                        @for row in comparison.rows() {
                            tr { @for cell in row { td { (cell) } } }
                        }
                    }
                }
            }
        }
    }
}
