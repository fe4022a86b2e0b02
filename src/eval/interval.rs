//! Means with the interval in which they would lie on other text of the kind.
//!
//! Tokens of one row depend on each other, so the rows are what was sampled: the variance is that of a ratio
//! of row sums (Cochran, Sampling Techniques, 1977, §2.11), and its quantile Student's t.

use serde::Serialize;

/// With fewer rows than this an interval says nothing.
const MIN_ROWS: usize = 5;

/// A mean and, where enough rows were sampled, its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    pub value: f64,
    pub interval: Option<[f64; 2]>,
}

impl Estimate {
    /// Σ sums / Σ counts over rows of (sum, count).
    pub fn of_rows(rows: &[(f64, usize)]) -> Self {
        let total: f64 = rows.iter().map(|row| row.0).sum();
        let count: usize = rows.iter().map(|row| row.1).sum();
        let value = total / count.max(1) as f64;
        let n = rows.len() as f64;
        let interval = (rows.len() >= MIN_ROWS && count > 0).then(|| {
            let squares: f64 = rows.iter().map(|&(sum, count)| (sum - value * count as f64).powi(2)).sum();
            let error = (squares * n / (n - 1.0)).sqrt() / count as f64;
            let half = student_t(rows.len() - 1) * error;
            [value - half, value + half]
        });
        Self { value, interval }
    }

    /// The share of `hits` among `trials` independent ones, with Wilson's interval (1927).
    pub fn of_trials(hits: usize, trials: usize) -> Self {
        let n = trials.max(1) as f64;
        let share = hits as f64 / n;
        let z2 = Z * Z;
        let centre = (share + z2 / (2.0 * n)) / (1.0 + z2 / n);
        let half = Z / (1.0 + z2 / n) * (share * (1.0 - share) / n + z2 / (4.0 * n * n)).sqrt();
        Self { value: share, interval: (trials >= MIN_ROWS).then_some([centre - half, centre + half]) }
    }

    /// The same after a growing function, such as exp.
    pub fn map(self, f: impl Fn(f64) -> f64) -> Self {
        Self { value: f(self.value), interval: self.interval.map(|ends| ends.map(f)) }
    }
}

/// The 97.5 % quantile of the normal distribution.
const Z: f64 = 1.959_963_985;

/// The same of Student's t with ν degrees of freedom, from four on, by the Cornish-Fisher expansion
/// (Abramowitz and Stegun, 26.7.5).
fn student_t(freedom: usize) -> f64 {
    let (z, v) = (Z, freedom as f64);
    z + (z.powi(3) + z) / (4.0 * v)
        + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * v.powi(2))
        + (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / (384.0 * v.powi(3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (freedom, want) in [(4, 2.776), (9, 2.262), (30, 2.042), (1000, 1.962)] {
            assert!((student_t(freedom) - want).abs() < 0.01, "{freedom}: {}", student_t(freedom));
        }
    }

    #[test]
    fn rows_of_one_size_give_the_interval_of_their_means() {
        let rows = [(10.0, 10), (12.0, 10), (8.0, 10), (11.0, 10), (9.0, 10)];
        let estimate = Estimate::of_rows(&rows);
        // Means 1.0 1.2 0.8 1.1 0.9: deviation 0.15811, error of their mean 0.070711, t(4) = 2.776.
        let [low, high] = estimate.interval.unwrap();
        assert_eq!(estimate.value, 1.0);
        assert!((high - 1.0 - 0.1963).abs() < 5e-4 && (low + high - 2.0).abs() < 1e-12, "{low} {high}");
        assert_eq!(Estimate::of_rows(&rows[..4]).interval, None);
        assert_eq!(Estimate::of_rows(&[]).value, 0.0);
    }

    #[test]
    fn a_share_has_wilsons_interval() {
        let [low, high] = Estimate::of_trials(8, 10).interval.unwrap();
        assert!((low - 0.4902).abs() < 1e-4 && (high - 0.9433).abs() < 1e-4, "{low} {high}");
        let [low, high] = Estimate::of_trials(0, 20).interval.unwrap();
        assert!(low.abs() < 1e-12 && (high - 0.1611).abs() < 1e-4, "{low} {high}");
    }
}
