// Y = f(X) * W^T (+ bias) (+ Y) for few rows of X: what gemv and qgemv share.
//
// A thread owns four or eight outputs of all rows. Its workgroup brings a chunk of X into workgroup memory,
// normalized or gated on the way, and LANES threads share the spans of a chunk: pieces of the depth
// that belong to one group. RMS normalization needs the sum of squares only at the end, as a factor.

struct GemvParams {
    n: u32, // outputs
    k: u32, // features of the input
    y_offset: u32,
    y_row: u32,
    has_bias: u32,
    add: u32,
    eps: f32,
    first: u32, // workgroups of earlier dispatches
    spans: u32,
    span_quads: u32, // quads of X in a span
    chunk_spans: u32,
    depth_quads: u32, // quads of X in all spans
    // The packed weight's.
    group_spans: u32,
    groups: u32,
    word_rows: u32,
    pad: u32,
}

override ROWS: u32 = 1u; // of X and Y, at most 4
override THREADS: u32 = 64u; // at most 64
override LANES: u32 = 1u; // a power of two that divides THREADS
override INPUT: u32 = 0u; // 0: x as it is. 1: RMS-normalized. 2: silu of the first half times the second
override ORDERED: bool = false; // slots of the depth take features in another order

const STAGED = 960u;
const NO_FEATURE = 0xffffffffu;

// X as it is multiplied, [ROWS, quads of the chunk]; then each thread's sums of squares.
var<workgroup> staged: array<vec4<f32>, 1024>;

// Four features of a row; `squares` takes up those of the input.
fn four_features(row: u32, quad: u32) -> vec4<f32> {
    if INPUT == 2u {
        let gate = x[row * (p.k / 2u) + quad];
        // Clamped, since a shader may do anything with infinity.
        return gate / (1.0 + exp(min(-gate, vec4(88.0)))) * x[row * (p.k / 2u) + p.k / 4u + quad];
    }
    return x[row * (p.k / 4u) + quad];
}

// One feature of a row, or zero: times its norm's weight, and by itself.
fn one_feature(row: u32, feature: u32) -> vec2<f32> {
    if feature == NO_FEATURE {
        return vec2(0.0);
    }
    let value = four_features(row, feature / 4u)[feature % 4u];
    if INPUT == 1u {
        return vec2(value * norm[feature / 4u][feature % 4u], value);
    }
    return vec2(value);
}

// Brings `quads` quads of all rows from `first` on; returns each row's sum of squares of what this
// thread brought. All threads must come here, and pass a barrier afterwards.
fn stage(first: u32, quads: u32, local: u32) -> vec4<f32> {
    var squares = vec4<f32>();
    for (var row = 0u; row < ROWS; row++) {
        var sum = 0.0;
        for (var quad = local; quad < quads; quad += THREADS) {
            let at = first + quad;
            var value: vec4<f32>;
            if ORDERED {
                let a = one_feature(row, order[4u * at]);
                let b = one_feature(row, order[4u * at + 1u]);
                let c = one_feature(row, order[4u * at + 2u]);
                let d = one_feature(row, order[4u * at + 3u]);
                value = vec4(a.x, b.x, c.x, d.x);
                sum += a.y * a.y + b.y * b.y + c.y * c.y + d.y * d.y;
            } else {
                value = four_features(row, at);
                if INPUT == 1u {
                    sum += dot(value, value);
                    value *= norm[at];
                }
            }
            staged[row * quads + quad] = value;
        }
        squares += select(vec4<f32>(), vec4(sum), vec4(row) == vec4(0u, 1u, 2u, 3u));
    }
    return squares;
}

// The factor of each row, when all of X has been staged.
fn input_factor() -> vec4<f32> {
    if INPUT != 1u {
        return vec4(1.0);
    }
    var sum = vec4<f32>();
    for (var thread = 0u; thread < THREADS; thread++) {
        sum += staged[STAGED + thread];
    }
    return 1.0 / sqrt(sum / f32(p.k) + p.eps);
}

// Four outputs of each row.
struct Sums {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
}

// Writes outputs 4 * four.. of each row from the sums of all lanes, whose threads are `stride` apart.
// All threads must come here.
fn finish(sums: Sums, factor: vec4<f32>, four: u32, lane: u32, local: u32, stride: u32) {
    var total = sums;
    if LANES > 1u {
        workgroupBarrier();
        staged[local * ROWS] = total.a;
        if ROWS > 1u { staged[local * ROWS + 1u] = total.b; }
        if ROWS > 2u { staged[local * ROWS + 2u] = total.c; }
        if ROWS > 3u { staged[local * ROWS + 3u] = total.d; }
        workgroupBarrier();
        if lane > 0u {
            return;
        }
        for (var other = 1u; other < LANES; other++) {
            let at = (local + other * stride) * ROWS;
            total.a += staged[at];
            if ROWS > 1u { total.b += staged[at + 1u]; }
            if ROWS > 2u { total.c += staged[at + 2u]; }
            if ROWS > 3u { total.d += staged[at + 3u]; }
        }
    }
    store(0u, 4u * four, total.a * factor.x);
    if ROWS > 1u { store(1u, 4u * four, total.b * factor.y); }
    if ROWS > 2u { store(2u, 4u * four, total.c * factor.z); }
    if ROWS > 3u { store(3u, 4u * four, total.d * factor.w); }
}

fn store(row: u32, col: u32, values: vec4<f32>) {
    var rest = values;
    for (var i = 0u; i < 4u && col + i < p.n; i++) {
        let at = p.y_offset + row * p.y_row + col + i;
        var value = rest.x;
        rest = rest.yzww;
        if p.has_bias != 0u {
            value += bias[col + i];
        }
        if p.add != 0u {
            value += y[at];
        }
        y[at] = value;
    }
}
