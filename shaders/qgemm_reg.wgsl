// C = alpha * A * B + beta * C (+ bias) for a packed weight B, 8x8 outputs per thread in registers: the
// same as gemm_reg but for where B's blocks come from. Scales multiply the sums of each group.
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

// Sums of the 8x8 outputs: cIJ holds the transpose of a 4x4 block, as WGSL's matrices are columns.
struct Sums {
    c00: mat4x4<f32>,
    c01: mat4x4<f32>,
    c10: mat4x4<f32>,
    c11: mat4x4<f32>,
}

// Where the rows of A are read.
struct Rows {
    upper: vec4<u32>,
    lower: vec4<u32>,
}

// Adds four slots and goes on to the next. Codes are centred here and scaled at the end of a group.
fn add_block(
    sums: ptr<function, Sums>,
    rows: ptr<function, Rows>,
    left: mat4x4<f32>,
    right: mat4x4<f32>,
    left_zeros: vec4<f32>,
    right_zeros: vec4<f32>,
) {
    let upper = a_block((*rows).upper);
    let lower = a_block((*rows).lower);
    var bt0 = left;
    var bt1 = right;
    if ZEROS {
        bt0 = centred(left, left_zeros);
        bt1 = centred(right, right_zeros);
    }
    (*sums).c00 += bt0 * upper;
    (*sums).c01 += bt1 * upper;
    (*sums).c10 += bt0 * lower;
    (*sums).c11 += bt1 * lower;
    (*rows).upper += a_quad_step();
    (*rows).lower += a_quad_step();
}

fn scaled(block: mat4x4<f32>, scales: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(block[0] * scales, block[1] * scales, block[2] * scales, block[3] * scales);
}

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
    var c00 = mat4x4<f32>();
    var c01 = mat4x4<f32>();
    var c10 = mat4x4<f32>();
    var c11 = mat4x4<f32>();
    // Eight neighbouring outputs lie in one tile.
    let four = (p.col0 + j) / 4u;
    var at = words_of(four);
    var rows = Rows(a_quads(i, 0u), a_quads(i + 4u, 0u));
    var l = 0u;
    for (var g = 0u; g < p.groups; g++) {
        let left = grid_of(four, g);
        let right = grid_of(four + 1u, g);
        let y = left.zeros;
        let z = right.zeros;
        let end = min(l + p.group, p.k);
        var sums = Sums();
        // The moves are written out: they must be constants to every compiler.
        if BITS == 2u {
            for (; l < end; l += 16u) {
                let u = words[at];
                let v = words[at + 1u];
                let m0 = vec4(0x40000000u, 0x10000000u, 0x4000000u, 0x1000000u);
                add_block(&sums, &rows, four_codes(u, m0), four_codes(v, m0), y, z);
                let m1 = vec4(0x400000u, 0x100000u, 0x40000u, 0x10000u);
                add_block(&sums, &rows, four_codes(u, m1), four_codes(v, m1), y, z);
                let m2 = vec4(0x4000u, 0x1000u, 0x400u, 0x100u);
                add_block(&sums, &rows, four_codes(u, m2), four_codes(v, m2), y, z);
                let m3 = vec4(0x40u, 0x10u, 0x4u, 0x1u);
                add_block(&sums, &rows, four_codes(u, m3), four_codes(v, m3), y, z);
                at += TILE_QUADS;
            }
        } else if BITS == 3u {
            for (; l < end; l += 4u) {
                let start = words_of(four);
                let u = crossing_codes(start, l);
                add_block(&sums, &rows, u, crossing_codes(start + 1u, l), y, z);
            }
        } else if BITS == 4u {
            for (; l < end; l += 8u) {
                let u = words[at];
                let v = words[at + 1u];
                let m0 = vec4(0x10000000u, 0x1000000u, 0x100000u, 0x10000u);
                add_block(&sums, &rows, four_codes(u, m0), four_codes(v, m0), y, z);
                let m1 = vec4(0x1000u, 0x100u, 0x10u, 0x1u);
                add_block(&sums, &rows, four_codes(u, m1), four_codes(v, m1), y, z);
                at += TILE_QUADS;
            }
        } else {
            for (; l < end; l += 4u) {
                let m0 = vec4(0x1000000u, 0x10000u, 0x100u, 0x1u);
                let u = four_codes(words[at], m0);
                add_block(&sums, &rows, u, four_codes(words[at + 1u], m0), y, z);
                at += TILE_QUADS;
            }
        }
        c00 += scaled(sums.c00, left.scales);
        c01 += scaled(sums.c01, right.scales);
        c10 += scaled(sums.c10, left.scales);
        c11 += scaled(sums.c11, right.scales);
    }
    store_block(i, j, c00);
    store_block(i, j + 4u, c01);
    store_block(i + 4u, j, c10);
    store_block(i + 4u, j + 4u, c11);
}
