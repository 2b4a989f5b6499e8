//! From figures to pixels, and which figures stand at an axis.

use crate::bench::figures::Unit;

/// One axis.
pub(super) struct Scale {
    logarithmic: bool,
    range: (f64, f64),
    pixels: (i32, i32),
    pub(super) ticks: Vec<f64>,
}

/// The most ticks of an axis.
const MOST_TICKS: usize = 9;

impl Scale {
    /// A logarithmic axis on which just these places are named.
    pub(super) fn of_places(places: &[f64], pixels: (i32, i32)) -> Self {
        let range = (places.first().copied().unwrap_or(1.0), places.last().copied().unwrap_or(2.0));
        Self { logarithmic: range.0 > 0.0, range, pixels, ticks: places.to_vec() }
    }

    /// An axis on which all values from the least to the most have their place, with room around them.
    /// Shares go from 0 to 1, evenly; all else is logarithmic, for a decade at least.
    pub(super) fn of_values((least, most): (f64, f64), unit: Unit, pixels: (i32, i32)) -> Self {
        if unit == Unit::Share {
            let ticks = (0..=5).map(|i| f64::from(i) / 5.0).collect();
            return Self { logarithmic: false, range: (0.0, 1.0), pixels, ticks };
        }
        // A figure of nothing has no place on such an axis; it goes to its end.
        let most = if most > 0.0 { most } else { 1.0 };
        let least = if least > 0.0 && least.is_finite() { least.min(most) } else { most / 10.0 };
        let (mut low, mut high) = (least / 1.15, most * 1.15);
        let short = (10.0 / (high / low)).max(1.0).sqrt();
        (low, high) = (low / short, high * short);
        Self { logarithmic: true, range: (low, high), pixels, ticks: ticks(low, high) }
    }

    /// A value's pixel.
    pub(super) fn map(&self, value: f64) -> i32 {
        let at = |v: f64| if self.logarithmic { v.max(self.range.0).ln() } else { v };
        let (low, high) = (at(self.range.0), at(self.range.1));
        let part = ((at(value) - low) / (high - low)).clamp(0.0, 1.0);
        let (from, to) = (f64::from(self.pixels.0), f64::from(self.pixels.1));
        (from + part * (to - from)).round() as i32
    }
}

/// Round figures between the two: as many of 1, 2, 5 in each power of ten as there is room for.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let with = |steps: &[f64], every: usize| -> Vec<f64> {
        let powers = powers.clone().step_by(every);
        let all = powers.flat_map(|p| steps.iter().map(move |s| s * 10f64.powi(p)));
        all.filter(|v| (low..=high).contains(v)).collect()
    };
    let fine = [with(&[1.0, 2.0, 5.0], 1), with(&[1.0, 3.0], 1), with(&[1.0], 1)];
    let fitting = fine.into_iter().find(|t| t.len() <= MOST_TICKS);
    fitting.unwrap_or_else(|| with(&[1.0], 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(1.5, 120.0), [2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!(ticks(0.5, 2e4), [1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4]);
        assert_eq!(ticks(0.5, 2e6).len(), 7);
        assert!(ticks(1e-3, 1e12).len() <= MOST_TICKS);
    }

    #[test]
    fn every_value_has_a_pixel_inside() {
        for (least, most) in [(1.0, 1e6), (5.0, 5.0), (0.0, 7.0), (0.0, 0.0), (f64::INFINITY, 0.0)]
        {
            let scale = Scale::of_values((least, most), Unit::Time, (100, 500));
            assert!(scale.ticks.len() >= 2, "{least} {most}");
            for v in [least, most, 0.0] {
                assert!((100..=500).contains(&scale.map(v)), "{v} of {least} to {most}");
            }
        }
        let scale = Scale::of_values((0.93, 0.97), Unit::Share, (0, 1000));
        assert_eq!((scale.map(0.0), scale.map(0.5), scale.map(1.0)), (0, 500, 1000));
    }

    #[test]
    fn places_are_apart_as_their_powers_are() {
        let scale = Scale::of_places(&[1.0, 10.0, 100.0], (0, 200));
        assert_eq!([1.0, 10.0, 100.0].map(|p| scale.map(p)), [0, 100, 200]);
    }
}
