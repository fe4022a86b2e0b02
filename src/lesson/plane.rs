//! Two weights: rounding to nearest, GPTQ and the closest point of a lattice, with the cells of each.
//!
//! With H = BᵀB the layer's error of integer codes z for weights w is ‖B(z − w)‖²: the codes are a lattice
//! with basis B, the weights a point t = Bw, and the best codes the lattice's point closest to it. GPTQ, taken
//! as it is, finds Babai's nearest plane instead (`gptq/mod.rs` has the derivation).

use serde::{Deserialize, Serialize};

use super::trace::{Levels, Ties, factor, sweep};
use crate::error::{Error, Result};

type Point = [f64; 2];

/// What is asked.
#[derive(Debug, Clone, Deserialize)]
pub struct Plane {
    /// The columns of B: where one step of each code moves the output.
    pub basis: [Point; 2],
    /// t = Bw.
    pub target: Point,
    /// The least and the greatest code; `None` for a grid without ends.
    pub clip: Option<[f64; 2]>,
    /// The weight that GPTQ takes first.
    pub first: usize,
    /// Lattice points are listed within ± this of the origin, in output coordinates.
    pub reach: f64,
}

/// The answer.
#[derive(Debug, Clone, Serialize)]
pub struct Solved {
    /// H = BᵀB.
    pub h: [Point; 2],
    /// w = B⁻¹t.
    pub weights: Point,
    /// Where GPTQ sees the second weight, once the first one's error is spread.
    pub moved: f64,
    /// "rtn", "gptq", "closest".
    pub methods: Vec<Choice>,
    pub points: Vec<Spot>,
}

/// What a method chooses.
#[derive(Debug, Clone, Serialize)]
pub struct Choice {
    pub name: String,
    pub codes: Point,
    pub point: Point,
    /// ‖B(z − w)‖.
    pub distance: f64,
    /// Corners of the targets, around 0, for which it chooses 0.
    pub cell: Vec<Point>,
    /// E‖B(z − w)‖² over all targets, without ends.
    pub mean_square: f64,
}

/// A point of the lattice.
#[derive(Debug, Clone, Serialize)]
pub struct Spot {
    pub codes: Point,
    pub point: Point,
    /// Within the ends.
    pub allowed: bool,
}

/// Points of a lattice listed at most.
const MOST_POINTS: usize = 4000;

fn dot(a: Point, b: Point) -> f64 {
    a[0] * b[0] + a[1] * b[1]
}

fn combined(basis: [Point; 2], z: Point) -> Point {
    [0, 1].map(|axis| basis[0][axis] * z[0] + basis[1][axis] * z[1])
}

fn minus(a: Point, b: Point) -> Point {
    [a[0] - b[0], a[1] - b[1]]
}

fn scaled(a: Point, by: f64) -> Point {
    [a[0] * by, a[1] * by]
}

impl Plane {
    /// Works it out.
    ///
    /// # Errors
    /// [`Error::Options`] for a basis that spans no plane, or numbers that make no sense.
    pub fn solve(&self) -> Result<Solved> {
        let [b0, b1] = self.basis;
        let numbers = [b0, b1, self.target].concat();
        let det = b0[0] * b1[1] - b0[1] * b1[0];
        if !numbers.iter().all(|x| x.abs() <= 1e3) || !(0.0..=1e3).contains(&self.reach) || self.first > 1 {
            return Err(Error::options("a number is missing or too large", "Use numbers up to 1000"));
        }
        if det.abs() < 0.05 * dot(b0, b0).sqrt().max(dot(b1, b1).sqrt()) || det.abs() < 1e-3 {
            return Err(Error::options(
                "both steps point the same way, so there is no lattice",
                "Move one of them aside",
            ));
        }
        if self.clip.is_some_and(|[low, high]| !(low <= high && low >= -1e3 && high <= 1e3)) {
            return Err(Error::options("the least code is above the greatest", "Exchange them"));
        }
        let t = self.target;
        let weights = [(t[0] * b1[1] - t[1] * b1[0]) / det, (b0[0] * t[1] - b0[1] * t[0]) / det];
        let h = [[dot(b0, b0), dot(b0, b1)], [dot(b0, b1), dot(b1, b1)]];
        let [low, high] = self.clip.unwrap_or([f64::NEG_INFINITY, f64::INFINITY]);
        let levels = Levels { scale: 1.0, low, high };

        let rtn = weights.map(|w| levels.code(w, Ties::Even));
        let order = [self.first, 1 - self.first];
        let u = factor(&h.concat(), 0.0, &order)?;
        let steps = sweep(&weights, 2, &order, &u, Ties::Even, |_, _| vec![levels]);
        let mut gptq = [0.0; 2];
        for step in &steps {
            gptq[step.column] = step.codes[0];
        }
        let closest = self.closest(h, weights, levels, gptq);

        // The first weight's step, across the second's.
        let (own, other) = (self.basis[self.first], self.basis[1 - self.first]);
        let across = minus(own, scaled(other, dot(own, other) / dot(other, other)));
        let hexagon = voronoi(self.basis);
        let choice = |name: &str, codes: Point, cell: Vec<Point>, mean_square: f64| {
            let point = combined(self.basis, codes);
            let missed = minus(point, t);
            Choice {
                name: name.to_owned(),
                codes,
                point,
                distance: dot(missed, missed).sqrt(),
                cell,
                mean_square,
            }
        };
        Ok(Solved {
            h,
            weights,
            moved: steps[1].current[0],
            methods: vec![
                choice("rtn", rtn, box_of(b0, b1), (h[0][0] + h[1][1]) / 12.0),
                choice("gptq", gptq, box_of(across, other), (dot(across, across) + dot(other, other)) / 12.0),
                choice("closest", closest, hexagon.clone(), second_moment(&hexagon)),
            ],
            points: self.points(det, levels),
        })
    }

    /// The closest point within the ends, among all that can be as close as `known`.
    fn closest(&self, h: [Point; 2], w: Point, levels: Levels, known: Point) -> Point {
        let distance = |z: Point| {
            let e = [z[0] - w[0], z[1] - w[1]];
            h[0][0] * e[0] * e[0] + 2.0 * h[0][1] * e[0] * e[1] + h[1][1] * e[1] * e[1]
        };
        // ‖B(z − w)‖² ≥ (z_i − w_i)²·det H / H_jj.
        let det = h[0][0] * h[1][1] - h[0][1] * h[1][0];
        let reach = |i: usize| (distance(known) * h[1 - i][1 - i] / det).sqrt() + 1e-9;
        let range = |i: usize| {
            let (from, to) =
                ((w[i] - reach(i)).ceil().max(levels.low), (w[i] + reach(i)).floor().min(levels.high));
            (0..).map(move |k| from + f64::from(k)).take_while(move |&z| z <= to)
        };
        let mut best = known;
        for z in range(0).flat_map(|z0| range(1).map(move |z1| [z0, z1])) {
            if distance(z) < distance(best) {
                best = z;
            }
        }
        best
    }

    fn points(&self, det: f64, levels: Levels) -> Vec<Spot> {
        let [b0, b1] = self.basis;
        let reach = self.reach;
        // |z| for a point within the square: rows of B⁻¹.
        let most = [(b1[1].abs() + b1[0].abs()), (b0[1].abs() + b0[0].abs())]
            .map(|sum| (sum * reach / det.abs()).floor().min(500.0) as i32);
        let inside = |code: f64| (levels.low..=levels.high).contains(&code);
        let all =
            (-most[0]..=most[0]).flat_map(|z0| (-most[1]..=most[1]).map(move |z1| [z0, z1].map(f64::from)));
        all.map(|codes| Spot {
            codes,
            point: combined(self.basis, codes),
            allowed: codes.iter().all(|&code| inside(code)),
        })
        .filter(|spot| spot.point.iter().all(|x| x.abs() <= reach))
        .take(MOST_POINTS)
        .collect()
    }
}

/// The parallelogram of half steps around 0.
fn box_of(a: Point, b: Point) -> Vec<Point> {
    [[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]].map(|z| combined([a, b], z)).to_vec()
}

/// The points closer to 0 than to any other of the lattice.
fn voronoi(basis: [Point; 2]) -> Vec<Point> {
    // Lagrange's reduction: the neighbours that matter are then sums of ±1 of each.
    let [mut a, mut b] = basis;
    loop {
        if dot(a, a) > dot(b, b) {
            (a, b) = (b, a);
        }
        let times = (dot(a, b) / dot(a, a)).round();
        if times == 0.0 {
            break;
        }
        b = minus(b, scaled(a, times));
    }
    let far = 2.0 * dot(b, b).sqrt();
    let mut cell: Vec<Point> = vec![[-far, -far], [far, -far], [far, far], [-far, far]];
    for neighbour in [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]].map(|z| combined([a, b], z)) {
        for side in [neighbour, scaled(neighbour, -1.0)] {
            cell = cut(&cell, side);
        }
    }
    cell
}

/// The part of a convex `cell` that is closer to 0 than to `point`.
fn cut(cell: &[Point], point: Point) -> Vec<Point> {
    let beyond = |p: Point| dot(p, point) - 0.5 * dot(point, point);
    let mut kept = Vec::with_capacity(cell.len() + 1);
    for (at, &p) in cell.iter().enumerate() {
        let q = cell[(at + 1) % cell.len()];
        let (from, to) = (beyond(p), beyond(q));
        if from <= 1e-12 {
            kept.push(p);
        }
        if (from < -1e-12 && to > 1e-12) || (from > 1e-12 && to < -1e-12) {
            let share = from / (from - to);
            kept.push([p[0] + share * (q[0] - p[0]), p[1] + share * (q[1] - p[1])]);
        }
    }
    kept
}

/// The mean of ‖x‖² over a polygon around 0.
fn second_moment(cell: &[Point]) -> f64 {
    let (mut area, mut moment) = (0.0, 0.0);
    for (at, &p) in cell.iter().enumerate() {
        let q = cell[(at + 1) % cell.len()];
        let twice = p[0] * q[1] - p[1] * q[0];
        area += twice / 2.0;
        moment += twice / 12.0 * (dot(p, p) + dot(p, q) + dot(q, q));
    }
    moment / area
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::noise;

    fn plane(basis: [Point; 2], target: Point, clip: Option<[f64; 2]>) -> Plane {
        Plane { basis, target, clip, first: 0, reach: 4.0 }
    }

    #[test]
    fn a_square_lattice_knows_no_difference() {
        let solved = plane([[1.0, 0.0], [0.0, 1.0]], [0.4, 1.3], None).solve().unwrap();
        for method in &solved.methods {
            assert_eq!(method.codes, [0.0, 1.0], "{}", method.name);
            assert!((method.mean_square - 1.0 / 6.0).abs() < 1e-12);
            assert_eq!(method.cell.len(), 4);
        }
        assert_eq!(solved.points.len(), 81);
    }

    #[test]
    fn each_method_has_its_own_cell() {
        // In a cell of its method, 0 is what the method chooses; a little outside it is not.
        let numbers = noise(400, 7);
        for four in numbers.chunks(4) {
            let four: Vec<f64> = four.iter().map(|&x| f64::from(x)).collect();
            let basis = [[four[0], four[1]], [four[2], four[3]]];
            let Ok(solved) = plane(basis, [0.0, 0.0], None).solve() else { continue };
            for (index, method) in solved.methods.iter().enumerate() {
                for (at, &corner) in method.cell.iter().enumerate() {
                    let next = method.cell[(at + 1) % method.cell.len()];
                    let edge = [0, 1].map(|axis| (corner[axis] + next[axis]) / 2.0);
                    let codes =
                        |by: f64| plane(basis, scaled(edge, by), None).solve().unwrap().methods[index].codes;
                    assert_eq!(codes(0.99), [0.0, 0.0], "{} {basis:?}", method.name);
                    assert_ne!(codes(1.01), [0.0, 0.0], "{} {basis:?}", method.name);
                }
            }
            let means: Vec<f64> = solved.methods.iter().map(|method| method.mean_square).collect();
            assert!(means[2] <= means[1] + 1e-9 && means[1] <= means[0] + 1e-9, "{means:?}");
        }
    }

    #[test]
    fn the_closest_point_is_closest_within_the_ends_too() {
        let numbers = noise(600, 11);
        for six in numbers.chunks(6) {
            let six: Vec<f64> = six.iter().map(|&x| f64::from(x)).collect();
            let (basis, target) = ([[six[0], six[1]], [six[2], six[3]]], [3.0 * six[4], 3.0 * six[5]]);
            for clip in [None, Some([-2.0, 1.0])] {
                let Ok(solved) = plane(basis, target, clip).solve() else { continue };
                let least = solved.methods[2].distance;
                let spots = solved.points.iter().filter(|spot| spot.allowed);
                for spot in spots {
                    let missed = minus(spot.point, target);
                    assert!(dot(missed, missed).sqrt() >= least - 1e-9);
                }
                assert!(solved.methods.iter().all(|method| method.distance >= least - 1e-12));
                if let Some([low, high]) = clip {
                    let codes = solved.methods.iter().flat_map(|method| method.codes);
                    assert!(codes.into_iter().all(|code| (low..=high).contains(&code)));
                }
            }
        }
    }

    #[test]
    fn steps_that_point_the_same_way_are_refused() {
        let error = plane([[1.0, 1.0], [2.0, 2.0]], [0.0, 0.0], None).solve().unwrap_err();
        assert!(error.to_string().contains("same way"), "{error}");
    }
}
