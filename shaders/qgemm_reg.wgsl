// C = alpha * A * B + beta * C (+ bias) for a packed weight B, 8x8 outputs per thread in registers: the
// same as gemm_reg but for where B's blocks come from.
//
// Dispatch: a workgroup writes 64x64 outputs; workgroups count along columns first, unfolded over
// x and y. CPU twin: src/kernels/qmatmul/cpu.rs.
#import gemm_params

@group(0) @binding(0) var<uniform> p: GemmParams;
@group(0) @binding(1) var<storage, read> a: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> words: array<vec4<u32>>; // [tiles, word_rows, 8]
@group(0) @binding(3) var<storage, read> grid: array<vec4<u32>>; // [tiles, groups, 8 or 16]
@group(0) @binding(4) var<storage, read> bias: array<f32>; // [n], read only if has_bias
@group(0) @binding(5) var<storage, read_write> c: array<f32>; // [m, n], rows c_row apart

#import gemm_a
#import qcodes
#import gemm_packed
#import gemm_store

@compute @workgroup_size(8, 8)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
) {
    let tile = group.y * groups.x + group.x;
    let i = (tile / p.tiles_x) * 64u + local.y * 8u;
    let j = (tile % p.tiles_x) * 64u + local.x * 8u;
    if i >= p.m || j >= p.n {
        return;
    }
    // cIJ holds the transpose of a 4x4 block of the product, as WGSL's matrices are columns.
    var c00 = mat4x4<f32>();
    var c01 = mat4x4<f32>();
    var c10 = mat4x4<f32>();
    var c11 = mat4x4<f32>();
    // Eight neighbouring outputs lie in one tile.
    let four = (p.col0 + j) / 4u;
    let start = words_of(four);
    let a_step = a_quad_step();
    var a0 = a_quads(i, 0u);
    var a1 = a_quads(i + 4u, 0u);
    var l = 0u;
    for (var g = 0u; g < p.groups; g++) {
        let grid0 = grid_of(four, g);
        let grid1 = grid_of(four + 1u, g);
        let end = min(l + p.group, p.k);
        for (; l < end; l += 4u) {
            let at0 = a_block(a0);
            let at1 = a_block(a1);
            let bt0 = packed_block(start, l, grid0);
            let bt1 = packed_block(start + 1u, l, grid1);
            c00 += bt0 * at0;
            c01 += bt1 * at0;
            c10 += bt0 * at1;
            c11 += bt1 * at1;
            a0 += a_step;
            a1 += a_step;
        }
    }
    store_block(i, j, c00);
    store_block(i, j + 4u, c01);
    store_block(i + 4u, j, c10);
    store_block(i + 4u, j + 4u, c11);
}
