// One group's codes, one after another, to where the loss is lowest (see src/kernels/descend.rs for the
// formula).
//
// Dispatch: a thread per row from `first` on, 64 in a workgroup, unfolded over x and y.
// CPU twin: src/kernels/descend.rs.

struct Params {
    n: u32,
    c0: u32, // the group's first column
    width: u32, // and how many it has
    groups: u32,
    group: u32,
    maxq: f32,
    // The rows of this dispatch.
    first: u32,
    end: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> square: array<f32>; // [width, width]
@group(0) @binding(2) var<storage, read> scales: array<f32>; // [rows, groups]
@group(0) @binding(3) var<storage, read> zeros: array<f32>; // [rows, groups]
@group(0) @binding(4) var<storage, read_write> pull: array<f32>; // [rows, width]
@group(0) @binding(5) var<storage, read_write> units: array<f32>; // [rows, n]
@group(0) @binding(6) var<storage, read_write> errors: array<f32>; // [rows, n]

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
    let scale = scales[row * p.groups + p.group];
    let zero = zeros[row * p.groups + p.group];
    for (var j = 0u; j < p.width; j++) {
        let at = row * p.n + p.c0 + j;
        let unit = units[at];
        let best = unit + pull[row * p.width + j] / (scale * square[j * p.width + j]);
        let new_unit = clamp(round(best), -zero, p.maxq - zero);
        if new_unit == unit {
            continue;
        }
        let moved = scale * (new_unit - unit);
        units[at] = new_unit;
        errors[at] -= moved;
        for (var k = 0u; k < p.width; k++) {
            pull[row * p.width + k] -= moved * square[j * p.width + k];
        }
    }
}
