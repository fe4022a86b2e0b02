//! Which layers have how many bits, where those are an average.

use super::table;
use crate::gptq::scheme::BITS;
use crate::pipeline::Plan;
use crate::pipeline::allocation::{Allocation, OfKind};

/// What is known of it: counts by kind of layer, once it is settled.
pub fn print(plan: &Plan) {
    let Some(allocation) = &plan.allocation else { return };
    let weights: u64 = allocation.shares.iter().map(|share| share.weights).sum();
    let settled = plan.output.mixed.as_ref().is_some_and(|mixed| mixed.allocation.is_some());
    let others = match plan.modules.len() - plan.units.iter().map(|unit| unit.modules.len()).sum::<usize>() {
        0 => String::new(),
        1 => "; a layer whose bits an override says is not counted".to_owned(),
        count => format!("; {count} layers whose bits overrides say are not counted"),
    };
    if !settled {
        say!(
            "bits: {} on average over {} weights{others}. Which layers get how many is measured when the run begins",
            allocation.average,
            millions(weights)
        );
        return;
    }
    say!(
        "bits: {:.4} on average over {} weights, at most {} as asked{others}",
        allocation.reached(),
        millions(weights),
        allocation.average
    );
    table::print(&["layers", "2 bits", "3 bits", "4 bits", "8 bits", "average"], &rows(allocation));
}

fn rows(allocation: &Allocation) -> Vec<Vec<String>> {
    let row = |OfKind { kind, counts, average }| {
        let counts = BITS.iter().map(|width| counts.get(width).map_or("-".to_owned(), usize::to_string));
        std::iter::once(kind).chain(counts).chain([format!("{average:.2}")]).collect()
    };
    allocation.by_kind().into_iter().map(row).collect()
}

fn millions(weights: u64) -> String {
    match weights {
        w if w < 1_000_000 => w.to_string(),
        w => format!("{:.1} million", w as f64 / 1e6),
    }
}
