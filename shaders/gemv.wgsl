// Y = f(X) * W^T (+ bias) (+ Y) for few rows of X and a dense weight [n, k], k a multiple of 8 (of 4
// for f32).
//
// A span is a vec4 of words of the weight. Dispatch: a workgroup has 4 * THREADS / LANES outputs;
// workgroups are unfolded over x and y. CPU twin: src/kernels/gemv/cpu.rs.
#import gemv
#import unpack

@group(0) @binding(0) var<uniform> p: GemvParams;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>>; // [n, k], packed as ELEM says
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>; // [ROWS, k], or 2 k for INPUT = 2
@group(0) @binding(3) var<storage, read> norm: array<vec4<f32>>; // [k], read for INPUT = 1
@group(0) @binding(4) var<storage, read> order: array<u32>; // never read
@group(0) @binding(5) var<storage, read> bias: array<f32>; // [n], read if has_bias
@group(0) @binding(6) var<storage, read_write> y: array<f32>;

override ELEM: u32 = 0u;

// Four features of four outputs, a column for each output.
fn add_quad(sums: ptr<function, Sums>, weights: mat4x4<f32>, at: u32, row: u32) {
    (*sums).a += staged[at] * weights;
    if ROWS > 1u { (*sums).b += staged[at + row] * weights; }
    if ROWS > 2u { (*sums).c += staged[at + 2u * row] * weights; }
    if ROWS > 3u { (*sums).d += staged[at + 3u * row] * weights; }
}

fn pairs(low: u32, high: u32) -> vec4<f32> {
    return vec4<f32>(unpack2(low, ELEM), unpack2(high, ELEM));
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    // Neighbouring threads read neighbouring words of a row.
    let lane = local % LANES;
    let four = (p.first + group.y * groups.x + group.x) * (THREADS / LANES) + local / LANES;
    // Outputs past the last repeat it.
    let rows = min(vec4(4u * four) + vec4(0u, 1u, 2u, 3u), vec4(p.n - 1u)) * p.spans;

    var sums = Sums();
    var squares = vec4<f32>();
    for (var first = 0u; first < p.spans; first += p.chunk_spans) {
        if first > 0u {
            workgroupBarrier();
        }
        let first_quad = first * p.span_quads;
        let end = min(first + p.chunk_spans, p.spans);
        let quads = (end - first) * p.span_quads;
        squares += stage(first_quad, quads, local);
        staged[STAGED + local] = squares;
        workgroupBarrier();
        for (var s = first + lane; s < end; s += LANES) {
            let i = w[rows.x + s];
            let j = w[rows.y + s];
            let k = w[rows.z + s];
            let l = w[rows.w + s];
            let quad = (s - first) * p.span_quads;
            if ELEM == ELEM_F32 {
                let block = mat4x4<f32>(
                    bitcast<vec4<f32>>(i),
                    bitcast<vec4<f32>>(j),
                    bitcast<vec4<f32>>(k),
                    bitcast<vec4<f32>>(l),
                );
                add_quad(&sums, block, quad, quads);
            } else {
                let low = mat4x4<f32>(pairs(i.x, i.y), pairs(j.x, j.y), pairs(k.x, k.y), pairs(l.x, l.y));
                add_quad(&sums, low, quad, quads);
                let high = mat4x4<f32>(pairs(i.z, i.w), pairs(j.z, j.w), pairs(k.z, k.w), pairs(l.z, l.w));
                add_quad(&sums, high, quad + 1u, quads);
            }
        }
    }
    finish(sums, input_factor(), four, lane, local, 1u);
}
