// Rows times factors of their own: out[r][j] = x[r][j] · factors[r].
//
// Dispatch: a thread per element from `first` on, 64 in a workgroup, unfolded over x and y.
// CPU twin: src/kernels/stretch.rs.
struct Params {
    n: u32,
    // The elements that this dispatch writes.
    first: u32,
    end: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> factors: array<f32>; // [rows]
@group(0) @binding(2) var<storage, read> x: array<f32>; // [rows, n]
@group(0) @binding(3) var<storage, read_write> out: array<f32>; // [rows, n]

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = p.first + (group.y * groups.x + group.x) * 64u + local;
    if at < p.end {
        out[at] = x[at] * factors[at / p.n];
    }
}
