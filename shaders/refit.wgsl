// One group's scales by least squares (see src/kernels/refit.rs for the formula).
//
// Dispatch: a thread per row from `first` on, 64 in a workgroup, unfolded over x and y.
// CPU twin: src/kernels/refit.rs.
#import round_scale

struct Params {
    n: u32,
    c0: u32, // the group's first column
    width: u32, // and how many it has
    groups: u32,
    group: u32,
    // The rows of this dispatch.
    first: u32,
    end: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> pull: array<f32>; // [rows, width]
@group(0) @binding(2) var<storage, read> push: array<f32>; // [rows, width]
@group(0) @binding(3) var<storage, read> units: array<f32>; // [rows, n]
@group(0) @binding(4) var<storage, read_write> scales: array<f32>; // [rows, groups]
@group(0) @binding(5) var<storage, read_write> errors: array<f32>; // [rows, n]

// The largest finite f16.
const LARGEST: f32 = 65504.0;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = p.first + (group.y * groups.x + group.x) * 64u + local;
    if row >= p.end {
        return;
    }
    var above = 0.0;
    var below = 0.0;
    for (var i = 0u; i < p.width; i++) {
        let unit = units[row * p.n + p.c0 + i];
        above += pull[row * p.width + i] * unit;
        below += push[row * p.width + i] * unit;
    }
    let at = row * p.groups + p.group;
    let old = scales[at];
    if below <= 0.0 {
        return;
    }
    let best = old + above / below;
    // A scale that would change its sign is one that rounding decides; it stays.
    if best * sign(old) <= 0.0 || abs(best) > LARGEST {
        return;
    }
    let new_scale = sign(old) * round_scale(abs(best));
    scales[at] = new_scale;
    for (var i = 0u; i < p.width; i++) {
        let column = row * p.n + p.c0 + i;
        errors[column] += (old - new_scale) * units[column];
        pull[row * p.width + i] += (old - new_scale) * push[row * p.width + i];
    }
}
