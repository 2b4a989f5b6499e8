//! Figures as pictures: SVG with logarithmic axes (shares have a linear one), named contenders, units at
//! the ticks, and where it was measured below. Several places make a line for each contender; one place
//! makes a row with a dot for each.

mod scale;

use std::error::Error;

use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use self::scale::Scale;
use super::figures::{Panel, Point, Section, Unit};

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Done<T = ()> = Result<T, Box<dyn Error>>;

const WIDTH: u32 = 1060;
/// Title and what is shown, above the plot.
const HEAD: i32 = 66;
/// Where it was measured, below it.
const FOOT: i32 = 34;
const LEGEND: i32 = 330;
const INK: RGBColor = RGBColor(34, 34, 34);
const PALE: RGBColor = RGBColor(110, 110, 110);
const GRID: RGBColor = RGBColor(224, 224, 224);
/// The backend writes sizes a quarter smaller than asked.
const FONT: f64 = 1.24;
/// With more contenders, bars for their spread would lie over one another.
const MOST_BARS: usize = 6;

/// Draws one panel.
pub(super) fn svg(section: &Section, panel: &Panel) -> Result<String, String> {
    let mut text = String::new();
    let lines = panel.places().len() > 1;
    let height = match lines {
        true => 560.max(HEAD + FOOT + 60 + 24 * panel.contenders().len() as i32),
        false => HEAD + FOOT + 56 + 30 * panel.points.len() as i32,
    };
    let drawn = (|| -> Done {
        let root = SVGBackend::with_string(&mut text, (WIDTH, height as u32)).into_drawing_area();
        root.fill(&WHITE)?;
        let title = format!("{}: {}", section.name, panel.title);
        write(&root, &title, (20, 14), 18.0, INK, HPos::Left)?;
        write(&root, &explained(panel, lines), (20, 40), 12.5, PALE, HPos::Left)?;
        let mut place = section.place();
        if section.partial {
            place.insert_str(0, "PARTIAL · ");
        }
        write(&root, &place, (20, height - FOOT + 10), 12.0, PALE, HPos::Left)?;
        let plot = root.margin(HEAD, FOOT, 0, 0);
        match lines {
            true => draw_lines(&plot, panel)?,
            false => draw_dots(&plot, panel)?,
        }
        root.present()?;
        Ok(())
    })();
    drawn.map_err(|e| format!("{} {} cannot be drawn: {e}", section.name, panel.id))?;
    Ok(text)
}

/// What the marks are, in a line.
fn explained(panel: &Panel, lines: bool) -> String {
    let better = if panel.unit.more_is_better() { "more" } else { "less" };
    let spread = panel.points.iter().any(|p| p.min.is_some());
    let bars = match panel.points.iter().any(|p| p.p99.is_some()) {
        true => "bars from the minimum to the 99th percentile",
        false => "bars from the minimum to the maximum",
    };
    let scale = if panel.unit == Unit::Share { "" } else { "logarithmic, " };
    match spread && (!lines || panel.contenders().len() <= MOST_BARS) {
        true => format!("{scale}{better} is better; medians, {bars}"),
        false => format!("{scale}{better} is better; medians"),
    }
}

fn write(
    area: &Area<'_>,
    text: &str,
    at: (i32, i32),
    size: f64,
    colour: RGBColor,
    to: HPos,
) -> Done {
    let style = ("sans-serif", size * FONT).into_font().color(&colour);
    area.draw(&Text::new(text.to_owned(), at, style.pos(Pos::new(to, VPos::Top))))?;
    Ok(())
}

/// How a contender looks.
#[derive(Clone, Copy)]
struct Look {
    colour: RGBColor,
    width: u32,
    /// Of the marks.
    shape: usize,
}

/// The pool in blues and thick, floors in greys, others in colours that tell them apart.
fn looks(contenders: &[&str]) -> Vec<Look> {
    const POOL: [u32; 3] = [0x0b57d0, 0x00a3bf, 0x6a3fd0];
    const FLOOR: [u32; 3] = [0x555555, 0x888888, 0xaaaaaa];
    const OTHER: [u32; 9] =
        [0xd55e00, 0x009e73, 0xcc3d8f, 0xe6a100, 0x8c564b, 0xb3001b, 0x6b8e23, 0x5e3c99, 0x17635f];
    let mut next = [0; 3];
    let mut look = |name: &str| {
        let (kind, colours, width) = match name {
            _ if name.starts_with("pool") => (0, &POOL[..], 3),
            _ if name.starts_with("floor") || name == "ring" => (1, &FLOOR[..], 1),
            _ => (2, &OTHER[..], 2),
        };
        let n = next[kind];
        next[kind] += 1;
        let [_, r, g, b] = colours[n % colours.len()].to_be_bytes();
        Look { colour: RGBColor(r, g, b), width, shape: if kind == 2 { n + 1 } else { n } }
    };
    contenders.iter().map(|name| look(name)).collect()
}

/// A mark in pixels.
fn mark(area: &Area<'_>, (x, y): (i32, i32), look: Look) -> Done {
    let fill = look.colour.filled();
    match look.shape % 4 {
        0 => area.draw(&Circle::new((x, y), 5, fill))?,
        1 => area.draw(&Rectangle::new([(x - 4, y - 4), (x + 4, y + 4)], fill))?,
        2 => area.draw(&TriangleMarker::new((x, y), 6, fill))?,
        _ => {
            let diamond = vec![(x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)];
            area.draw(&Polygon::new(diamond, fill))?;
        }
    }
    Ok(())
}

fn line(area: &Area<'_>, points: Vec<(i32, i32)>, colour: RGBColor, width: u32) -> Done {
    area.draw(&PathElement::new(points, colour.stroke_width(width)))?;
    Ok(())
}

/// From the least to the most of all points; the least above nothing, which no logarithmic axis has.
fn extent(panel: &Panel, with_bars: bool) -> (f64, f64) {
    let ends = panel.points.iter().flat_map(|p| {
        let (min, max) = if with_bars { p.range() } else { (p.median, p.median) };
        [min, p.median, max]
    });
    let above = ends.filter(|v| *v > 0.0 && v.is_finite());
    above.fold((f64::INFINITY, 0.0), |(least, most), v| (least.min(v), f64::max(most, v)))
}

fn draw_lines(area: &Area<'_>, panel: &Panel) -> Done {
    let contenders = panel.contenders();
    let places = panel.places();
    let bars = contenders.len() <= MOST_BARS;
    let (width, height) = area.dim_in_pixel();
    let (left, right) = (110, width as i32 - LEGEND - 20);
    let (top, bottom) = (8, height as i32 - 44);
    let x = Scale::of_places(&places, (left + 30, right - 30));
    let y = Scale::of_values(extent(panel, bars), panel.unit, (bottom, top));
    for &tick in &y.ticks {
        let at = y.map(tick);
        line(area, vec![(left, at), (right, at)], GRID, 1)?;
        write(area, &panel.unit.show_tick(tick), (left - 8, at - 8), 12.0, INK, HPos::Right)?;
    }
    for &place in &places {
        let at = x.map(place);
        line(area, vec![(at, top), (at, bottom)], GRID, 1)?;
        write(area, &panel.axis.show(place), (at, bottom + 6), 12.0, INK, HPos::Center)?;
    }
    let frame = vec![(left, top), (left, bottom), (right, bottom)];
    line(area, frame, PALE, 1)?;
    write(area, panel.axis.title(), ((left + right) / 2, bottom + 24), 12.0, PALE, HPos::Center)?;
    let looks = looks(&contenders);
    let n = contenders.len() as i32;
    // The first come last, and so to lie on top: the pool is among them.
    for (i, (name, look)) in contenders.iter().zip(&looks).enumerate().rev() {
        let points: Vec<&Point> = places.iter().filter_map(|&p| panel.at(name, p)).collect();
        let at = |p: &Point| (x.map(p.x), y.map(p.median));
        line(area, points.iter().map(|p| at(p)).collect(), look.colour, look.width)?;
        for point in &points {
            let (px, py) = at(point);
            if bars && point.min.is_some() {
                // Beside each other, so that all can be seen.
                let px = px + (2 * i as i32 - n + 1) * 4;
                let (min, max) = point.range();
                bar(area, [(px, y.map(min)), (px, y.map(max))], look.colour)?;
            }
            mark(area, (px, py), *look)?;
        }
    }
    legend(area, panel, &contenders, &looks, right + 20)
}

/// A thin line with ends.
fn bar(area: &Area<'_>, [from, to]: [(i32, i32); 2], colour: RGBColor) -> Done {
    line(area, vec![from, to], colour, 1)?;
    let upright = from.0 == to.0;
    for (x, y) in [from, to] {
        let end = if upright { [(x - 3, y), (x + 3, y)] } else { [(x, y - 3), (x, y + 3)] };
        line(area, end.to_vec(), colour, 1)?;
    }
    Ok(())
}

/// The contenders in the order of their lines' ends, with the figure there.
fn legend(area: &Area<'_>, panel: &Panel, contenders: &[&str], looks: &[Look], left: i32) -> Done {
    let last = panel.places().last().copied().unwrap_or_default();
    let end = |name: &str| panel.at(name, last).map(|p| p.median);
    let mut rows: Vec<(&str, Look)> =
        contenders.iter().copied().zip(looks.iter().copied()).collect();
    // The highest line first; those that do not reach the end last.
    rows.sort_by(|a, b| {
        let key = |r: &(&str, Look)| end(r.0).unwrap_or(f64::NEG_INFINITY);
        key(b).total_cmp(&key(a))
    });
    let right = WIDTH as i32 - 20;
    let head = format!("at {}", panel.axis.show(last));
    write(area, &head, (right, 6), 12.0, PALE, HPos::Right)?;
    for (i, (name, look)) in rows.into_iter().enumerate() {
        let y = 36 + 24 * i as i32;
        line(area, vec![(left, y), (left + 30, y)], look.colour, look.width)?;
        mark(area, (left + 15, y), look)?;
        write(area, name, (left + 40, y - 8), 12.5, INK, HPos::Left)?;
        let figure = end(name).map_or("–".to_owned(), |v| panel.unit.show(v));
        write(area, &figure, (right, y - 8), 12.5, INK, HPos::Right)?;
    }
    Ok(())
}

fn draw_dots(area: &Area<'_>, panel: &Panel) -> Done {
    let mut points: Vec<&Point> = panel.points.iter().collect();
    let contenders: Vec<&str> = points.iter().map(|p| p.contender.as_str()).collect();
    let looks = looks(&contenders);
    let look =
        |name: &str| contenders.iter().zip(&looks).find(|(c, _)| **c == name).map(|(_, l)| *l);
    // The best first.
    points.sort_by(|a, b| a.median.total_cmp(&b.median));
    if panel.unit.more_is_better() {
        points.reverse();
    }
    let (width, height) = area.dim_in_pixel();
    let longest = contenders.iter().map(|c| c.chars().count()).max().unwrap_or(0) as i32;
    let (left, right) = (40 + longest * 8, width as i32 - 130);
    let (top, bottom) = (8, height as i32 - 30);
    let x = Scale::of_values(extent(panel, true), panel.unit, (left, right));
    for &tick in &x.ticks {
        let at = x.map(tick);
        line(area, vec![(at, top), (at, bottom)], GRID, 1)?;
        write(area, &panel.unit.show_tick(tick), (at, bottom + 6), 12.0, INK, HPos::Center)?;
    }
    line(area, vec![(left, top), (left, bottom), (right, bottom)], PALE, 1)?;
    for (i, point) in points.into_iter().enumerate() {
        let y = top + 20 + 30 * i as i32;
        let Some(look) = look(&point.contender) else { continue };
        write(area, &point.contender, (left - 12, y - 8), 12.5, INK, HPos::Right)?;
        if point.min.is_some() {
            let (min, max) = point.range();
            bar(area, [(x.map(min), y), (x.map(max), y)], look.colour)?;
        }
        mark(area, (x.map(point.median), y), look)?;
        let figure = panel.unit.show(point.median);
        write(area, &figure, (WIDTH as i32 - 20, y - 8), 12.5, INK, HPos::Right)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::figures::Axis;

    #[test]
    fn a_figure_of_nothing_does_not_push_the_others_off_the_plot() {
        let mut low = Point::single("a", 1.0, 5.0);
        low.min = Some(0.0);
        let points = vec![low, Point::single("a", 2.0, 400.0)];
        let panel = Panel::new("cpu", "", Unit::TimePerByte, Axis::Bytes, points);
        assert_eq!(extent(&panel, true), (5.0, 400.0));
    }
}
