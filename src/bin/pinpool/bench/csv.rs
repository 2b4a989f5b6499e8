//! Figures as CSV: a line for each contender at each place.

use ::csv::Writer;

use super::figures::Section;

const HEAD: [&str; 11] =
    ["bench", "figure", "unit", "contender", "axis", "x", "min", "median", "p99", "p999", "max"];

/// All figures, under one line of heads.
pub(super) fn rows(sections: &[Section]) -> Result<String, String> {
    let mut writer = Writer::from_writer(Vec::new());
    let failed = |e: ::csv::Error| e.to_string();
    writer.write_record(HEAD).map_err(failed)?;
    for section in sections {
        for panel in &section.panels {
            for point in &panel.points {
                let number = |v: Option<f64>| v.map(|v| v.to_string()).unwrap_or_default();
                let x = Some(point.x).filter(|_| !panel.axis.title().is_empty());
                let record = [
                    section.name.to_owned(),
                    panel.id.clone(),
                    panel.unit.name().to_owned(),
                    point.contender.clone(),
                    panel.axis.title().to_owned(),
                    number(x),
                    number(point.min),
                    number(Some(point.median)),
                    number(point.p99),
                    number(point.p999),
                    number(point.max),
                ];
                writer.write_record(record).map_err(failed)?;
            }
        }
    }
    let bytes = writer.into_inner().map_err(|e| e.to_string())?;
    String::from_utf8(bytes).map_err(|e| e.to_string())
}
