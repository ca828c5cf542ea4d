//! Plots, drawn by hand: a few lines in a frame need no library.

use std::fmt::Write as _;

const WIDTH: f64 = 760.0;
const PANEL: f64 = 260.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 170.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 44.0;

/// Dark enough on white. People who see no difference between red and green can still
/// distinguish them.
const COLOURS: [&str; 6] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#a07800",
];

/// A line through points.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// One frame with lines.
#[derive(Debug, Clone)]
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) x: String,
    pub(crate) y: String,
    /// Whether the vertical axis counts powers of ten.
    pub(crate) logarithmic: bool,
    pub(crate) lines: Vec<Line>,
}

/// An axis: values to places.
struct Axis {
    low: f64,
    high: f64,
    logarithmic: bool,
    ticks: Vec<f64>,
}

impl Axis {
    fn new(values: impl Iterator<Item = f64>, logarithmic: bool) -> Self {
        let values: Vec<f64> = values
            .filter(|value| value.is_finite() && (!logarithmic || *value > 0.0))
            .collect();
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(0.0, f64::max);
        if logarithmic {
            let least = if least.is_finite() { least } else { 1.0 };
            let low = 10f64.powf(least.log10().floor());
            let high = 10f64.powf(most.max(least).log10().floor() + 1.0);
            let ticks = std::iter::successors(Some(low), |tick| Some(tick * 10.0))
                .take_while(|tick| *tick <= high * 1.001)
                .collect();
            return Self {
                low,
                high,
                logarithmic,
                ticks,
            };
        }
        // 1, 2 or 5 times a power of ten, five to ten of them.
        let rough = if most > 0.0 { most / 5.0 } else { 1.0 };
        let power = 10f64.powf(rough.log10().floor());
        let step = [5.0, 2.0, 1.0]
            .map(|factor| factor * power)
            .into_iter()
            .find(|step| *step <= rough)
            .unwrap_or(power);
        let ticks: Vec<f64> = std::iter::successors(Some(0.0), |tick| Some(tick + step))
            .take_while(|tick| *tick < most + step)
            .collect();
        Self {
            low: 0.0,
            high: ticks.last().copied().unwrap_or(1.0).max(step),
            logarithmic,
            ticks,
        }
    }

    /// 0 at the low end, 1 at the high one.
    fn place(&self, value: f64) -> f64 {
        match self.logarithmic {
            true => {
                (value.max(self.low).log10() - self.low.log10())
                    / (self.high.log10() - self.low.log10())
            }
            false => (value - self.low) / (self.high - self.low),
        }
    }
}

/// A number as an axis has it: 20 k, 1.5 M.
fn short(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        size if size >= 1e9 => (value / 1e9, " G"),
        size if size >= 1e6 => (value / 1e6, " M"),
        size if size >= 1e3 => (value / 1e3, " k"),
        _ => (value, ""),
    };
    let text = format!("{scaled:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{text}{unit}")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// The panels below each other, as one picture.
pub(crate) fn picture(panels: &[Panel]) -> String {
    let height = PANEL * panels.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    for (index, panel) in panels.iter().enumerate() {
        draw(&mut svg, panel, PANEL * index as f64);
    }
    svg.push_str("</svg>\n");
    svg
}

/// Writing to a string does not fail.
fn draw(svg: &mut String, panel: &Panel, top: f64) {
    let points = || panel.lines.iter().flat_map(|line| &line.points);
    let x_axis = Axis::new(points().map(|point| point.0), false);
    let y_axis = Axis::new(points().map(|point| point.1), panel.logarithmic);
    let (wide, high) = (WIDTH - LEFT - RIGHT, PANEL - TOP - BOTTOM);
    let (begin, end) = (top + TOP, top + TOP + high);
    let x_at = |value: f64| LEFT + x_axis.place(value) * wide;
    let y_at = |value: f64| end - y_axis.place(value) * high;
    let mut text = |x: f64, y: f64, anchor: &str, more: &str, words: &str| {
        let _ = writeln!(
            svg,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\"{more}>{}</text>",
            escaped(words)
        );
    };
    text(LEFT, top + 24.0, "start", " font-size=\"14\"", &panel.title);
    text(LEFT + wide / 2.0, end + 36.0, "middle", "", &panel.x);
    let middle = begin + high / 2.0;
    let turned = format!(" transform=\"rotate(-90 16 {middle:.1})\"");
    text(16.0, middle, "middle", &turned, &panel.y);
    for tick in &x_axis.ticks {
        text(x_at(*tick), end + 18.0, "middle", "", &short(*tick));
    }
    for tick in &y_axis.ticks {
        text(LEFT - 8.0, y_at(*tick) + 4.0, "end", "", &short(*tick));
    }
    for (index, line) in panel.lines.iter().enumerate() {
        let colour = format!(" fill=\"{}\"", COLOURS[index % COLOURS.len()]);
        let y = begin + 12.0 + 18.0 * index as f64;
        text(LEFT + wide + 12.0, y, "start", &colour, &line.name);
    }
    for tick in &y_axis.ticks {
        let y = y_at(*tick);
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>",
            LEFT + wide
        );
    }
    for (index, line) in panel.lines.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let places: Vec<String> = line
            .points
            .iter()
            .map(|(x, y)| format!("{:.1},{:.1}", x_at(*x), y_at(*y)))
            .collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
            places.join(" ")
        );
        // A line of one point would not be seen, and of many the dots would hide it.
        if line.points.len() <= 40 {
            for (x, y) in &line.points {
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>",
                    x_at(*x),
                    y_at(*y)
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(logarithmic: bool, points: Vec<(f64, f64)>) -> Panel {
        Panel {
            title: "a < b & \"c\"".into(),
            x: "acks/s".into(),
            y: "us".into(),
            logarithmic,
            lines: vec![Line {
                name: "p50".into(),
                points,
            }],
        }
    }

    /// Names of the elements, in order, each closed; nothing but numbers in coordinates.
    fn elements(svg: &str) -> Vec<&str> {
        let mut open = Vec::new();
        let mut seen = Vec::new();
        for tag in svg.split('<').skip(1) {
            let (inside, _) = tag.split_once('>').expect("a tag that ends");
            if let Some(name) = inside.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name));
                continue;
            }
            let name = inside.split([' ', '/']).next().unwrap();
            seen.push(name);
            assert_eq!(inside.matches('"').count() % 2, 0, "{inside}");
            if !inside.ends_with('/') {
                open.push(name);
            }
        }
        assert_eq!(open, Vec::<&str>::new());
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        seen
    }

    #[test]
    fn picture_is_well_formed_and_has_every_point() {
        let points = vec![(1_000.0, 120.0), (50_000.0, 900.0), (70_000.0, 12_000.0)];
        let svg = picture(&[panel(true, points.clone()), panel(false, points)]);
        let seen = elements(&svg);
        assert_eq!(seen.iter().filter(|name| **name == "circle").count(), 6);
        assert_eq!(seen.iter().filter(|name| **name == "polyline").count(), 2);
        assert!(svg.contains("a &lt; b &amp; &quot;c&quot;"));
    }

    #[test]
    fn picture_of_nothing_and_of_zeros_is_well_formed_too() {
        for points in [vec![], vec![(0.0, 0.0)], vec![(5.0, 5.0)]] {
            for logarithmic in [false, true] {
                elements(&picture(&[panel(logarithmic, points.clone())]));
            }
        }
    }

    #[test]
    fn points_lie_within_their_frame() {
        for logarithmic in [false, true] {
            let axis = Axis::new([3.0, 70.0, 999.0].into_iter(), logarithmic);
            for value in [3.0, 70.0, 999.0] {
                assert!((0.0..=1.0).contains(&axis.place(value)), "{value}");
            }
            assert!((2..=11).contains(&axis.ticks.len()), "{:?}", axis.ticks);
        }
    }

    #[test]
    fn numbers_on_axes_are_short() {
        assert_eq!(short(0.0), "0");
        assert_eq!(short(1_500.0), "1.5 k");
        assert_eq!(short(20_000_000.0), "20 M");
    }
}
