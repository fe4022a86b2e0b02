// y = silu(gate) * up with silu(x) = x / (1 + exp(-x)), four elements per thread.
//
// The gate is in y and up in x; or with HALVES both are in x, whose rows hold the gate first.
//
// Dispatch: one workgroup per 64 quads, unfolded over x and y. CPU twin: src/kernels/swiglu.rs.
override HALVES: bool = false;

struct Params {
    // Quads of y, and of one of its rows (read only with HALVES).
    quads: u32,
    row_quads: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let quad = (group.y * groups.x + group.x) * 64u + local;
    if quad >= p.quads {
        return;
    }
    var gate: vec4<f32>;
    var up: vec4<f32>;
    if HALVES {
        let at = quad + quad / p.row_quads * p.row_quads;
        gate = x[at];
        up = x[at + p.row_quads];
    } else {
        gate = y[quad];
        up = x[quad];
    }
    // Clamped, since a shader may do anything with infinity.
    y[quad] = gate / (1.0 + exp(min(-gate, vec4(88.0)))) * up;
}
