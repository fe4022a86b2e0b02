// Weights from codes: scale[r][g] * (code[r][k] - zero[r][g]) with g = group_of[k].
//
// Dispatch: a thread per weight from `first` on, 64 in a workgroup, unfolded over x and y.
// CPU twin: src/kernels/dequant.rs.

struct Params {
    n: u32,
    groups: u32,
    // The weights that this dispatch writes, counted through all rows.
    first: u32,
    end: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> codes: array<u32>; // [rows, n], four bytes in a word
@group(0) @binding(2) var<storage, read> scales: array<f32>; // [rows, groups]
@group(0) @binding(3) var<storage, read> zeros: array<f32>; // [rows, groups]
@group(0) @binding(4) var<storage, read> group_of: array<u32>; // [n]
@group(0) @binding(5) var<storage, read_write> weights: array<f32>; // [rows, n]

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = p.first + (group.y * groups.x + group.x) * 64u + local;
    if at >= p.end {
        return;
    }
    let code = (codes[at / 4u] >> (8u * (at % 4u))) & 0xffu;
    let grid = at / p.n * p.groups + group_of[at % p.n];
    weights[at] = scales[grid] * (f32(code) - zeros[grid]);
}
