// Attention of single queries over a cache of keys and values, as decoding needs it.
//
// A workgroup owns one head of one query and walks over the keys that it sees, KEYS at a time. In the
// first half of a step the threads make a score each, and the next; in the second half they form slices
// of one thread per quad of the head, and each slice mixes its share of the step's values by online
// softmax. At the end the slices' mixes are put together.
//
// Dispatch: x counts heads, y queries. CPU twin: src/kernels/attention_row.rs.
#import unpack

struct Params {
    heads: u32,
    kv_heads: u32,
    head_quads: u32, // even
    // Position of the first query.
    start: u32,
    // How many keys a query sees at most, itself included.
    window: u32,
    scale: f32,
    // Read only with CAPPED.
    soft_cap: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> q: array<vec4<f32>>; // [tokens, heads, d]
@group(0) @binding(2) var<storage, read> k: array<vec4<u32>>; // [rows, kv_heads, d] as ELEM
@group(0) @binding(3) var<storage, read> v: array<vec4<u32>>; // the same
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>; // [tokens, heads, d]

override ELEM: u32 = 1u; // of keys and values, see `unpack`
// Scores s count as c * tanh(s / c).
override CAPPED: bool = false;
override THREADS: u32 = 128u; // at least head_quads
override KEYS: u32 = 256u;

// Below every score.
const LOWEST: f32 = -1.0e38;

var<workgroup> scores: array<f32, KEYS>;
var<workgroup> mixes: array<vec4<f32>, THREADS>;
var<workgroup> extents: array<vec2<f32>, THREADS>; // largest score, sum of weights

// The products of two quads of queries with the keys beside them.
fn product(query: u32, quad: u32) -> f32 {
    if ELEM == ELEM_F32 {
        return dot(q[query], bitcast<vec4<f32>>(k[quad])) + dot(q[query + 1u], bitcast<vec4<f32>>(k[quad + 1u]));
    }
    let words = k[quad >> 1u];
    let first = vec4<f32>(unpack2(words.x, ELEM), unpack2(words.y, ELEM));
    let second = vec4<f32>(unpack2(words.z, ELEM), unpack2(words.w, ELEM));
    return dot(q[query], first) + dot(q[query + 1u], second);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let query = (group.y * p.heads + group.x) * p.head_quads;
    let kv_step = p.kv_heads * p.head_quads;
    let kv_start = group.x / (p.heads / p.kv_heads) * p.head_quads;
    let end = p.start + group.y + 1u;
    let slices = THREADS / p.head_quads;
    let slice = local / p.head_quads;
    let quad = local % p.head_quads;

    var largest = LOWEST;
    var sum = 0.0;
    var mix = vec4<f32>();
    for (var first = select(0u, end - p.window, end > p.window); first < end; first += KEYS) {
        let count = min(KEYS, end - first);
        for (var slot = local; slot < count; slot += THREADS) {
            let at = kv_start + (first + slot) * kv_step;
            var score = 0.0;
            for (var i = 0u; i < p.head_quads; i += 2u) {
                score += product(query + i, at + i);
            }
            score *= p.scale;
            if CAPPED {
                // Clamped, since tanh of large numbers is not settled.
                score = p.soft_cap * tanh(clamp(score / p.soft_cap, -15.0, 15.0));
            }
            scores[slot] = score;
        }
        workgroupBarrier();
        if slice < slices {
            let before = largest;
            for (var slot = slice; slot < count; slot += slices) {
                largest = max(largest, scores[slot]);
            }
            let kept = exp(before - largest);
            sum *= kept;
            mix *= kept;
            for (var slot = slice; slot < count; slot += slices) {
                let weight = exp(scores[slot] - largest);
                let at = kv_start + (first + slot) * kv_step + quad;
                sum += weight;
                mix += weight * unpack4(v[quad_index(at, ELEM)], at, ELEM);
            }
        }
        workgroupBarrier();
    }
    mixes[local] = mix;
    extents[local] = vec2(largest, sum);
    workgroupBarrier();
    if slice == 0u {
        for (var other = 1u; other < slices; other++) {
            let at = other * p.head_quads + quad;
            let before = largest;
            largest = max(largest, extents[at].x);
            let kept = exp(before - largest);
            let taken = exp(extents[at].x - largest);
            sum = sum * kept + extents[at].y * taken;
            mix = mix * kept + mixes[at] * taken;
        }
        out[query + quad] = mix / sum;
    }
}
