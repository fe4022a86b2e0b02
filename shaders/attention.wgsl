// Causal attention with grouped heads and a sliding window, by online softmax.
//
// A thread owns one query row of one head and 64 of the head's dimensions (a slice). It walks over
// the keys four at a time with the largest score so far, the sum of exp(score - largest) and the
// mix of values weighted by them; when the largest grows, sum and mix are scaled down. All threads of
// a workgroup walk over the same keys, so that loads of keys and values are uniform, and mask what
// their own row must not see. No workgroup memory, no barriers.
//
// Dispatch: x counts tiles of ROWS query rows from `first_tile`, y heads times slices, z sequences
// from `first_sequence`. head_dim is a multiple of 16. CPU twin: src/kernels/attention.rs.
struct Params {
    seq_len: u32,
    heads: u32,
    kv_heads: u32,
    first_tile: u32,
    first_sequence: u32,
    // How many keys a row sees at most, itself included.
    window: u32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> q: array<vec4<f32>>; // [tokens, heads, d]
@group(0) @binding(2) var<storage, read> k: array<vec4<f32>>; // [tokens, kv_heads, d]
@group(0) @binding(3) var<storage, read> v: array<vec4<f32>>; // [tokens, kv_heads, d]
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>; // [tokens, heads, d]

override ROWS: u32 = 64u;
override HEAD_QUADS: u32 = 16u;

// Quads in a slice: sixteen vectors of sums, named rather than indexed so that they stay in registers.
const SLICE: u32 = 16u;
const LOWEST: f32 = -3.0e38;

// Sum over four keys of weight times quad `quad` of their values.
fn weighted(at: vec4<u32>, quad: u32, weight: vec4<f32>) -> vec4<f32> {
    return mat4x4<f32>(v[at.x + quad], v[at.y + quad], v[at.z + quad], v[at.w + quad]) * weight;
}

fn weighted4(at: vec4<u32>, quad: u32, weight: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(
        weighted(at, quad, weight),
        weighted(at, quad + 1u, weight),
        weighted(at, quad + 2u, weight),
        weighted(at, quad + 3u, weight),
    );
}

fn store4(at: u32, sums: mat4x4<f32>) {
    out[at] = sums[0];
    out[at + 1u] = sums[1];
    out[at + 2u] = sums[2];
    out[at + 3u] = sums[3];
}

@compute @workgroup_size(ROWS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let first_row = (p.first_tile + group.x) * ROWS;
    let row = first_row + local;
    let head = group.y % p.heads;
    let slice = group.y / p.heads * SLICE; // its first quad
    let sequence = (p.first_sequence + group.z) * p.seq_len; // its first token
    // Rows past the end repeat the last and do not store.
    let token = sequence + min(row, p.seq_len - 1u);
    let query = (token * p.heads + head) * HEAD_QUADS;
    let kv_head = head / (p.heads / p.kv_heads);

    // The keys that some row of the tile sees.
    let start = select(0u, first_row + 1u - p.window, first_row + 1u > p.window);
    let end = min(first_row + ROWS, p.seq_len);
    let in1 = slice + 4u < HEAD_QUADS;
    let in2 = slice + 8u < HEAD_QUADS;
    let in3 = slice + 12u < HEAD_QUADS;

    var largest = LOWEST;
    var sum = 0.0;
    var sums0 = mat4x4<f32>();
    var sums1 = mat4x4<f32>();
    var sums2 = mat4x4<f32>();
    var sums3 = mat4x4<f32>();
    for (var key = start; key < end; key += 4u) {
        let keys = vec4(key, key + 1u, key + 2u, key + 3u);
        // Keys past the end repeat the last and are masked.
        let at = ((sequence + min(keys, vec4(end - 1u))) * p.kv_heads + kv_head) * HEAD_QUADS;
        var score = vec4<f32>();
        for (var quad = 0u; quad < HEAD_QUADS; quad++) {
            let of_query = q[query + quad];
            score += vec4(
                dot(of_query, k[at.x + quad]),
                dot(of_query, k[at.y + quad]),
                dot(of_query, k[at.z + quad]),
                dot(of_query, k[at.w + quad]),
            );
        }
        let seen = (keys <= vec4(row)) & (keys + p.window > vec4(row)) & (keys < vec4(end));
        score = select(vec4(LOWEST), score * p.scale, seen);
        let before = largest;
        largest = max(largest, max(max(score.x, score.y), max(score.z, score.w)));
        let weight = select(vec4(0.0), exp(score - largest), seen);
        let kept = exp(before - largest);
        sum = sum * kept + dot(weight, vec4(1.0));
        sums0 = sums0 * kept + weighted4(at, slice, weight);
        if in1 {
            sums1 = sums1 * kept + weighted4(at, slice + 4u, weight);
        }
        if in2 {
            sums2 = sums2 * kept + weighted4(at, slice + 8u, weight);
        }
        if in3 {
            sums3 = sums3 * kept + weighted4(at, slice + 12u, weight);
        }
    }
    if row >= p.seq_len {
        return;
    }
    let result = query + slice;
    let share = 1.0 / sum;
    store4(result, sums0 * share);
    if in1 {
        store4(result + 4u, sums1 * share);
    }
    if in2 {
        store4(result + 8u, sums2 * share);
    }
    if in3 {
        store4(result + 12u, sums3 * share);
    }
}
