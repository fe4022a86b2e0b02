// Y = f(X) * W^T (+ bias) (+ Y) for few rows of X and a weight of packed codes.
//
// A thread owns eight outputs of a tile, quads q and q + 4 of its eight: what it loads of X serves
// both, and neighbouring threads read neighbouring words.
//
// Dispatch: a workgroup has 8 * THREADS / LANES outputs; workgroups are unfolded over x and y.
// CPU twin: src/kernels/qmatmul/cpu.rs.
#import gemv

@group(0) @binding(0) var<uniform> p: GemvParams;
@group(0) @binding(1) var<storage, read> words: array<vec4<u32>>; // [tiles, word_rows, 8]
@group(0) @binding(2) var<storage, read> grid: array<vec4<u32>>; // [tiles, groups, 8 or 16]
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>; // [ROWS, k], or 2 k for INPUT = 2
@group(0) @binding(4) var<storage, read> norm: array<vec4<f32>>; // [k], read for INPUT = 1
@group(0) @binding(5) var<storage, read> order: array<u32>; // [depth], read if ORDERED
@group(0) @binding(6) var<storage, read> bias: array<f32>; // [n], read if has_bias
@group(0) @binding(7) var<storage, read_write> y: array<f32>;

#import qcodes

const HALF_TILE = 4u;

// Sums over a span of codes times X, for both quads of outputs, and of X.
struct Span {
    low: Sums,
    high: Sums,
    x: vec4<f32>,
}

// Adds four slots: `at` is their place in `staged`, whose rows are `row` apart.
fn add_quad(span: ptr<function, Span>, low: mat4x4<f32>, high: mat4x4<f32>, at: u32, row: u32) {
    let a = staged[at];
    (*span).low.a += low * a;
    (*span).high.a += high * a;
    if ZEROS {
        (*span).x.x += dot(a, vec4(1.0));
    }
    if ROWS > 1u {
        let b = staged[at + row];
        (*span).low.b += low * b;
        (*span).high.b += high * b;
        if ZEROS {
            (*span).x.y += dot(b, vec4(1.0));
        }
    }
    if ROWS > 2u {
        let c = staged[at + 2u * row];
        (*span).low.c += low * c;
        (*span).high.c += high * c;
        if ZEROS {
            (*span).x.z += dot(c, vec4(1.0));
        }
    }
    if ROWS > 3u {
        let d = staged[at + 3u * row];
        (*span).low.d += low * d;
        (*span).high.d += high * d;
        if ZEROS {
            (*span).x.w += dot(d, vec4(1.0));
        }
    }
}

// sums += scales * (codes - zeros * x)
fn add_span(sums: Sums, codes: Sums, x: vec4<f32>, place: u32) -> Sums {
    let scales = four_scales(place);
    let zeros = four_zeros(place);
    var total = sums;
    total.a += scales * (codes.a - zeros * x.x);
    if ROWS > 1u { total.b += scales * (codes.b - zeros * x.y); }
    if ROWS > 2u { total.c += scales * (codes.c - zeros * x.z); }
    if ROWS > 3u { total.d += scales * (codes.d - zeros * x.w); }
    return total;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let eights = THREADS / LANES;
    let lane = local / eights;
    let eight = (p.first + group.y * groups.x + group.x) * eights + local % eights;
    // Threads past the last tile repeat it, since all must reach the barriers.
    let tile = min(eight / HALF_TILE, (p.n - 1u) / (4u * TILE_QUADS));
    let words_start = tile * p.word_rows * TILE_QUADS + eight % HALF_TILE;
    let grid_start = tile * p.groups * grid_step() + eight % HALF_TILE;
    // A slot of a tile fills BITS of the 32 bits of a word row.
    let span_rows = p.span_quads * BITS / 8u;

    var low = Sums();
    var high = Sums();
    var squares = vec4<f32>();
    for (var first = 0u; first < p.spans; first += p.chunk_spans) {
        if first > 0u {
            workgroupBarrier();
        }
        let first_quad = first * p.span_quads;
        let end = min(first + p.chunk_spans, p.spans);
        let quads = min(end * p.span_quads, p.depth_quads) - first_quad;
        squares += stage(first_quad, quads, local);
        staged[STAGED + local] = squares;
        workgroupBarrier();
        for (var s = first + lane; s < end; s += LANES) {
            var span = Span();
            var at = words_start + s * span_rows * TILE_QUADS;
            var quad = s * p.span_quads - first_quad;
            let quads_end = min(quad + p.span_quads, quads);
            // The moves are written out: they must be constants to every compiler.
            if BITS == 2u {
                for (; quad < quads_end; quad += 4u) {
                    let u = words[at];
                    let v = words[at + HALF_TILE];
                    let m0 = vec4(0x40000000u, 0x10000000u, 0x4000000u, 0x1000000u);
                    add_quad(&span, four_codes(u, m0), four_codes(v, m0), quad, quads);
                    let m1 = vec4(0x400000u, 0x100000u, 0x40000u, 0x10000u);
                    add_quad(&span, four_codes(u, m1), four_codes(v, m1), quad + 1u, quads);
                    let m2 = vec4(0x4000u, 0x1000u, 0x400u, 0x100u);
                    add_quad(&span, four_codes(u, m2), four_codes(v, m2), quad + 2u, quads);
                    let m3 = vec4(0x40u, 0x10u, 0x4u, 0x1u);
                    add_quad(&span, four_codes(u, m3), four_codes(v, m3), quad + 3u, quads);
                    at += TILE_QUADS;
                }
            } else if BITS == 3u {
                // 32 slots in three word rows; two quads of them cross from one to the next.
                for (; quad < quads_end; quad += 8u) {
                    let u0 = words[at];
                    let v0 = words[at + HALF_TILE];
                    let u1 = words[at + TILE_QUADS];
                    let v1 = words[at + TILE_QUADS + HALF_TILE];
                    let u2 = words[at + 2u * TILE_QUADS];
                    let v2 = words[at + 2u * TILE_QUADS + HALF_TILE];
                    let m0 = vec4(0x20000000u, 0x4000000u, 0x800000u, 0x100000u);
                    add_quad(&span, four_codes(u0, m0), four_codes(v0, m0), quad, quads);
                    let m1 = vec4(0x20000u, 0x4000u, 0x800u, 0x100u);
                    add_quad(&span, four_codes(u0, m1), four_codes(v0, m1), quad + 1u, quads);
                    let u01 = (u0 >> vec4(24u)) | (u1 * 0x100u);
                    let v01 = (v0 >> vec4(24u)) | (v1 * 0x100u);
                    add_quad(&span, four_codes(u01, m0), four_codes(v01, m0), quad + 2u, quads);
                    let m3 = vec4(0x2000000u, 0x400000u, 0x80000u, 0x10000u);
                    add_quad(&span, four_codes(u1, m3), four_codes(v1, m3), quad + 3u, quads);
                    let m4 = vec4(0x2000u, 0x400u, 0x80u, 0x10u);
                    add_quad(&span, four_codes(u1, m4), four_codes(v1, m4), quad + 4u, quads);
                    let u12 = (u1 >> vec4(28u)) | (u2 * 0x10u);
                    let v12 = (v1 >> vec4(28u)) | (v2 * 0x10u);
                    add_quad(&span, four_codes(u12, m0), four_codes(v12, m0), quad + 5u, quads);
                    let m6 = vec4(0x200000u, 0x40000u, 0x8000u, 0x1000u);
                    add_quad(&span, four_codes(u2, m6), four_codes(v2, m6), quad + 6u, quads);
                    let m7 = vec4(0x200u, 0x40u, 0x8u, 0x1u);
                    add_quad(&span, four_codes(u2, m7), four_codes(v2, m7), quad + 7u, quads);
                    at += 3u * TILE_QUADS;
                }
            } else if BITS == 4u {
                for (; quad < quads_end; quad += 2u) {
                    let u = words[at];
                    let v = words[at + HALF_TILE];
                    let m0 = vec4(0x10000000u, 0x1000000u, 0x100000u, 0x10000u);
                    add_quad(&span, four_codes(u, m0), four_codes(v, m0), quad, quads);
                    let m1 = vec4(0x1000u, 0x100u, 0x10u, 0x1u);
                    add_quad(&span, four_codes(u, m1), four_codes(v, m1), quad + 1u, quads);
                    at += TILE_QUADS;
                }
            } else {
                for (; quad < quads_end; quad++) {
                    let m0 = vec4(0x1000000u, 0x10000u, 0x100u, 0x1u);
                    let v = words[at + HALF_TILE];
                    add_quad(&span, four_codes(words[at], m0), four_codes(v, m0), quad, quads);
                    at += TILE_QUADS;
                }
            }
            let place = grid_start + s / p.group_spans * grid_step();
            low = add_span(low, span.low, span.x, place);
            high = add_span(high, span.high, span.x, place + HALF_TILE);
        }
    }
    let factor = input_factor();
    let four = eight / HALF_TILE * TILE_QUADS + eight % HALF_TILE;
    finish(low, factor, four, lane, local, eights);
    finish(high, factor, four + HALF_TILE, lane, local, eights);
}
