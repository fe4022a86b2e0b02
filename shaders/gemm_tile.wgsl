// C = alpha * A * B + beta * C (+ bias), by tiles in workgroup memory.
//
// A workgroup of THREADS x THREADS writes a tile of 8 THREADS squared outputs; each thread holds
// four 4x4 blocks of them, half a tile apart so that neighbours read neighbouring words. DEPTH
// steps along k are brought into workgroup memory at a time: 64 * THREADS * DEPTH bytes. For
// alignment see shared/gemm_a.wgsl.
//
// Dispatch: workgroups count along columns first, unfolded over x and y. CPU twin: `cpu` in
// src/kernels/gemm.rs.
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

override THREADS: u32 = 8u;
override DEPTH: u32 = 16u;

var<workgroup> a_tile: array<vec4<f32>, 2u * THREADS * DEPTH>; // [DEPTH, 2 THREADS] fours of rows
var<workgroup> b_tile: array<vec4<f32>, 2u * THREADS * DEPTH>; // [DEPTH, 2 THREADS] fours of columns

fn outer(row: vec4<f32>, col: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(row * col.x, row * col.y, row * col.z, row * col.w);
}

@compute @workgroup_size(THREADS, THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let fours = 2u * THREADS;
    let tile = group.y * groups.x + group.x;
    let i = (tile / p.tiles_x) * 4u * fours;
    let j = (tile % p.tiles_x) * 4u * fours;
    if i >= p.m || above_diagonal(i + 4u * fours - 1u, j) {
        return;
    }
    // cIJ holds the transpose of a 4x4 block of the product, as WGSL's matrices are columns.
    var c00 = mat4x4<f32>();
    var c01 = mat4x4<f32>();
    var c10 = mat4x4<f32>();
    var c11 = mat4x4<f32>();
    let blocks_deep = DEPTH / 4u;
    for (var l0 = 0u; l0 < p.k; l0 += DEPTH) {
        for (var block = thread; block < fours * blocks_deep; block += THREADS * THREADS) {
            let four = block / blocks_deep;
            let deep = 4u * (block % blocks_deep);
            let l = l0 + deep;
            var columns = mat4x4<f32>(); // column s: A[i.., l + s]
            var rows = mat4x4<f32>(); // column s: B[l + s, j..]
            if l + 4u <= p.k {
                columns = transpose(a_block(a_quads(i + 4u * four, l)));
                rows = b_block(b_quads(l, j + 4u * four));
            } else if l < p.k {
                columns = transpose(a_edge_block(i + 4u * four, l));
                rows = b_edge_block(l, j + 4u * four);
            }
            let at = deep * fours + four;
            a_tile[at] = columns[0];
            a_tile[at + fours] = columns[1];
            a_tile[at + 2u * fours] = columns[2];
            a_tile[at + 3u * fours] = columns[3];
            b_tile[at] = rows[0];
            b_tile[at + fours] = rows[1];
            b_tile[at + 2u * fours] = rows[2];
            b_tile[at + 3u * fours] = rows[3];
        }
        workgroupBarrier();
        // Four steps at a time: a loop of DEPTH known steps would be unrolled whole, which takes
        // some compilers seconds.
        let depth = min(DEPTH, p.k - l0);
        for (var deep = 0u; deep < depth; deep += 4u) {
            for (var step = 0u; step < 4u; step++) {
                let at = (deep + step) * fours;
                let a0 = a_tile[at + local.y];
                let a1 = a_tile[at + local.y + THREADS];
                let b0 = b_tile[at + local.x];
                let b1 = b_tile[at + local.x + THREADS];
                c00 += outer(b0, a0);
                c01 += outer(b1, a0);
                c10 += outer(b0, a1);
                c11 += outer(b1, a1);
            }
        }
        workgroupBarrier();
    }
    let row = i + 4u * local.y;
    let col = j + 4u * local.x;
    let half = 4u * THREADS;
    store_block(row, col, c00);
    store_block(row, col + half, c01);
    store_block(row + half, col, c10);
    store_block(row + half, col + half, c11);
}
