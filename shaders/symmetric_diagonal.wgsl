// The diagonal of the top square of a panel.
//
// Dispatch: a thread per column, 64 in a workgroup. CPU twin: `diagonal` in
// src/kernels/symmetric.rs.

struct Params {
    w: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> panel: array<f32>; // [rows, w]
@group(0) @binding(2) var<storage, read_write> diagonal: array<f32>; // [w]

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x < p.w {
        diagonal[id.x] = panel[id.x * p.w + id.x];
    }
}
