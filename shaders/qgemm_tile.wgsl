// C = alpha * A * B + beta * C (+ bias) for a packed weight B, by tiles in workgroup memory: the same as
// gemm_tile but for where B's blocks come from.
//
// Dispatch: workgroups count along columns first, unfolded over x and y. CPU twin:
// src/kernels/qmatmul/cpu.rs.
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
    if i >= p.m {
        return;
    }
    // cIJ holds the transpose of a 4x4 block of the product, as WGSL's matrices are columns.
    var c00 = mat4x4<f32>();
    var c01 = mat4x4<f32>();
    var c10 = mat4x4<f32>();
    var c11 = mat4x4<f32>();
    let blocks_deep = DEPTH / 4u;
    // What lies past the last tile of the weight is not there; the last one stands in for it.
    let last_four = (p.col0 + p.n - 1u) / 4u;
    for (var g = 0u; g < p.groups; g++) {
        let group_end = min((g + 1u) * p.group, p.k);
        for (var l0 = g * p.group; l0 < group_end; l0 += DEPTH) {
            for (var block = thread; block < fours * blocks_deep; block += THREADS * THREADS) {
                // Neighbouring threads read neighbouring words, and rows of A.
                let four = block % fours;
                let deep = 4u * (block / fours);
                let l = l0 + deep;
                if l < group_end {
                    let columns = transpose(a_block(a_quads(i + 4u * four, l)));
                    let mine = min(p.col0 / 4u + j / 4u + four, last_four);
                    let rows = packed_block(words_of(mine), l, grid_of(mine, g));
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
            }
            workgroupBarrier();
            // Groups are multiples of four slots.
            let depth = min(DEPTH, group_end - l0);
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
    }
    let row = i + 4u * local.y;
    let col = j + 4u * local.x;
    let half = 4u * THREADS;
    store_block(row, col, c00);
    store_block(row, col + half, c01);
    store_block(row + half, col, c10);
    store_block(row + half, col + half, c11);
}
