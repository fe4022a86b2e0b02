// Layer normalization: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, row by row.
//
// Dispatch: LANES threads per row, 64 in a workgroup, unfolded over x and y.
// CPU twin: src/kernels/layernorm.rs.
#import reduce

struct Params {
    rows: u32,
    row_quads: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [rows, d]
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>; // [d]
@group(0) @binding(3) var<storage, read> bias: array<vec4<f32>>; // [d]
@group(0) @binding(4) var<storage, read_write> y: array<vec4<f32>>; // [rows, d]

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = (group.y * groups.x + group.x) * (64u / LANES) + local / LANES;
    // Threads past the last row repeat it, since all must reach the barriers, and do not store.
    let start = min(row, p.rows - 1u) * p.row_quads;
    var total = 0.0;
    for (var quad = local % LANES; quad < p.row_quads; quad += LANES) {
        total += dot(x[start + quad], vec4(1.0));
    }
    let mean = row_sum(total, local) / f32(4u * p.row_quads);
    var squares = 0.0;
    for (var quad = local % LANES; quad < p.row_quads; quad += LANES) {
        let value = x[start + quad] - mean;
        squares += dot(value, value);
    }
    let scale = 1.0 / sqrt(row_sum(squares, local) / f32(4u * p.row_quads) + p.eps);
    if row < p.rows {
        for (var quad = local % LANES; quad < p.row_quads; quad += LANES) {
            y[start + quad] = (x[start + quad] - mean) * scale * weight[quad] + bias[quad];
        }
    }
}
