// Weighted rows added to where they came from: out[ids[i]] += weights[i] * y[i]. No id comes twice.
//
// Dispatch: a thread per quad of y, 64 in a workgroup, unfolded over x and y.
// CPU twin: src/kernels/scatter.rs.
struct Params {
    rows: u32,
    row_quads: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> y: array<vec4<f32>>; // [rows, d]
@group(0) @binding(2) var<storage, read> ids: array<u32>; // [rows]
@group(0) @binding(3) var<storage, read> weights: array<f32>; // [rows]
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>; // [tokens, d]

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = (group.y * groups.x + group.x) * 64u + local;
    let row = at / p.row_quads;
    if row >= p.rows {
        return;
    }
    out[ids[row] * p.row_quads + at % p.row_quads] += weights[row] * y[at];
}
