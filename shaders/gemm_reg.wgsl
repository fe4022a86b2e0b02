// C = alpha * A * B + beta * C (+ bias), 8x8 outputs per thread in registers.
//
// No workgroup memory and no barriers: what software adapters run best, and the equal of shared
// tiles on GPUs with large caches. The 4x4 block is the unit: four multiplications of 4x4 matrices
// for every four steps along k, each loaded by rows of four (see shared/gemm_a.wgsl for what
// must be aligned).
//
// Dispatch: a workgroup writes 64x64 outputs; workgroups count along columns first, unfolded over
// x and y. CPU twin: `cpu` in src/kernels/gemm.rs.
#import gemm_params
#import unpack

@group(0) @binding(0) var<uniform> p: GemmParams;
@group(0) @binding(1) var<storage, read> a: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> b: array<vec4<u32>>; // packed as ELEM says
@group(0) @binding(3) var<storage, read> bias: array<f32>; // [n], read only if has_bias
@group(0) @binding(4) var<storage, read_write> c: array<f32>; // [m, n], rows c_row apart

#import gemm_a
#import gemm_b
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
    if i >= p.m || j >= p.n || above_diagonal(i + 7u, j) {
        return;
    }
    // cIJ holds the transpose of a 4x4 block of the product, as WGSL's matrices are columns.
    var c00 = mat4x4<f32>();
    var c01 = mat4x4<f32>();
    var c10 = mat4x4<f32>();
    var c11 = mat4x4<f32>();
    let a_step = a_quad_step();
    let b_step = b_quad_step();
    var a0 = a_quads(i, 0u);
    var a1 = a_quads(i + 4u, 0u);
    var b0 = b_quads(0u, j);
    var b1 = b_quads(0u, j + 4u);
    for (var left = p.k / 4u; left > 0u; left--) {
        let at0 = a_block(a0);
        let at1 = a_block(a1);
        let bt0 = b_block(b0);
        let bt1 = b_block(b1);
        c00 += bt0 * at0;
        c01 += bt1 * at0;
        c10 += bt0 * at1;
        c11 += bt1 * at1;
        a0 += a_step;
        a1 += a_step;
        b0 += b_step;
        b1 += b_step;
    }
    let l = p.k & ~3u;
    if l < p.k {
        let at0 = a_edge_block(i, l);
        let at1 = a_edge_block(i + 4u, l);
        let bt0 = b_edge_block(l, j);
        let bt1 = b_edge_block(l, j + 4u);
        c00 += bt0 * at0;
        c01 += bt1 * at0;
        c10 += bt0 * at1;
        c11 += bt1 * at1;
    }
    store_block(i, j, c00);
    store_block(i, j + 4u, c01);
    store_block(i + 4u, j, c10);
    store_block(i + 4u, j + 4u, c11);
}
