// C = alpha * A * B + beta * C (+ bias): any shape, offset and stride, 4x4 outputs per thread.
//
// The slow but unconditional form: element (i, l) of A is a[a_offset + i * a_row + l * a_col], and
// the same for B, so every transposition and sub-matrix is only a choice of strides. It serves
// shapes that are not multiples of four; gemm_reg and gemm_tile serve all others.
//
// Dispatch: a workgroup writes 32x32 outputs; workgroups count along columns first, unfolded over
// x and y. CPU twin: `cpu` in src/kernels/gemm.rs.
#import gemm_params
#import unpack

@group(0) @binding(0) var<uniform> p: GemmParams;
@group(0) @binding(1) var<storage, read> a: array<f32>; // [m, k] by strides
@group(0) @binding(2) var<storage, read> b: array<u32>; // [k, n] by strides, packed as ELEM says
@group(0) @binding(3) var<storage, read> bias: array<f32>; // [n], read only if has_bias
@group(0) @binding(4) var<storage, read_write> c: array<f32>; // [m, n], rows c_row apart

#import gemm_store

override ELEM: u32 = 0u;

fn load_b(at: u32) -> f32 {
    if ELEM == ELEM_F32 {
        return bitcast<f32>(b[at]);
    }
    return unpack2(b[at >> 1u], ELEM)[at & 1u];
}

@compute @workgroup_size(8, 8)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
) {
    let tile = group.y * groups.x + group.x;
    let i0 = (tile / p.tiles_x) * 32u + local.y * 4u;
    let j0 = (tile % p.tiles_x) * 32u + local.x * 4u;
    if i0 >= p.m || j0 >= p.n || above_diagonal(i0 + 3u, j0) {
        return;
    }
    // Rows and columns past the edge repeat the last one; they are computed and not stored.
    let i = p.a_offset + min(vec4(i0, i0 + 1u, i0 + 2u, i0 + 3u), vec4(p.m - 1u)) * p.a_row;
    let j = p.b_offset + min(vec4(j0, j0 + 1u, j0 + 2u, j0 + 3u), vec4(p.n - 1u)) * p.b_col;
    var acc = mat4x4<f32>(); // transposed: column r is C[i0 + r, j0..]
    for (var l = 0u; l < p.k; l++) {
        let la = l * p.a_col;
        let lb = l * p.b_row;
        let row = vec4(load_b(j.x + lb), load_b(j.y + lb), load_b(j.z + lb), load_b(j.w + lb));
        acc += mat4x4<f32>(a[i.x + la] * row, a[i.y + la] * row, a[i.z + la] * row, a[i.w + la] * row);
    }
    store_block(i0, j0, acc);
}
