//! From a model directory to a quantized one.
//!
//! [`plan`] checks everything that can be checked before any work; [`run`] goes block by block and
//! stage by stage; [`journal`] lets a stopped run go on; [`events`] tells what is happening.

pub mod allocation;
mod bits;
mod block;
pub mod check;
pub mod convert;
pub mod corner;
pub mod estimate;
pub mod events;
mod groups;
mod inputs;
pub mod journal;
mod layer;
mod loaders;
pub mod plan;
pub mod report;
pub mod run;
mod scaling;
pub mod select;
pub mod sensitivity;
pub mod stream;
mod unfinished;

pub use allocation::Allocation;
pub use bits::{Average, Bits, Mixed};
pub use corner::Corner;
pub use events::{Event, Observer};
pub use groups::Groups;
pub use plan::{ModulePlan, Plan, PlanOptions, make_plan};
pub use report::{ModuleRow, RunReport};
pub use run::{RunOptions, run};
pub use select::{Output, Override, Values};
