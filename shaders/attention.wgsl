// Causal attention with grouped heads and a sliding window, by online softmax. The queries are the
// last tokens of each sequence, or all of them.
//
// A workgroup owns a tile of query rows of one head and walks over the keys that any of its rows sees,
// KEYS at a time, with each row's largest score so far, the sum of exp(score - largest), and the mix
// of values weighted by them; when the largest grows, sum and mix are scaled down.
// Its threads form GROUPS groups of PARTS: a group owns four rows. In the first half of a step each
// thread makes a part of its group's scores, in the second half each mixes sixteen of the head's
// dimensions for all four rows. Scores pass from one half to the other through workgroup memory;
// everything else is in 4x4 blocks in registers.
//
// Dispatch: x counts tiles of 4 * GROUPS query rows from `first_tile`, y heads, z sequences from
// `first_sequence`. CPU twin: src/kernels/attention.rs.
#import unpack

struct Params {
    // Queries of a sequence.
    seq_len: u32,
    // Keys before a sequence's first query, which has this position.
    start: u32,
    heads: u32,
    kv_heads: u32,
    first_tile: u32,
    first_sequence: u32,
    // How many keys a row sees at most, itself included.
    window: u32,
    scale: f32,
    // Read only with CAPPED.
    soft_cap: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> q: array<vec4<f32>>; // [tokens, heads, d]
@group(0) @binding(2) var<storage, read> k: array<vec4<u32>>; // [tokens, kv_heads, d] as ELEM
@group(0) @binding(3) var<storage, read> v: array<vec4<u32>>; // the same
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>; // [tokens, heads, d]

override ELEM: u32 = 0u; // of keys and values, see `unpack`
// Scores s count as c * tanh(s / c).
override CAPPED: bool = false;
override PARTS: u32 = 4u; // head_dim / 16
override GROUPS: u32 = 16u;
override KEYS: u32 = 32u; // a multiple of 8
override SCORES: u32 = GROUPS * KEYS;

const CORNERS = vec4<u32>(0u, 1u, 2u, 3u);
// Below every score. What is not seen lies lower still, so that its weight is 0 even while nothing
// has been seen.
const LOWEST: f32 = -1.0e38;
const UNSEEN: f32 = -3.0e38;

var<workgroup> scores: array<vec4<f32>, SCORES>; // [group, key]: one score for each of four rows

fn key(quad: u32) -> vec4<f32> {
    return unpack4(k[quad_index(quad, ELEM)], quad, ELEM);
}

fn value(quad: u32) -> vec4<f32> {
    return unpack4(v[quad_index(quad, ELEM)], quad, ELEM);
}

// Column j: the scores of key j for four rows, from one quad of queries and keys.
fn products(rows: mat4x4<f32>, at: vec4<u32>) -> mat4x4<f32> {
    return rows * mat4x4<f32>(key(at.x), key(at.y), key(at.z), key(at.w));
}

// Column r: a quad of values by the weight of row r.
fn weighted(quad: vec4<f32>, weight: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(quad * weight.x, quad * weight.y, quad * weight.z, quad * weight.w);
}

// Column r scaled by `factor[r]`.
fn scaled(block: mat4x4<f32>, factor: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(
        block[0] * factor.x,
        block[1] * factor.y,
        block[2] * factor.z,
        block[3] * factor.w,
    );
}

// A key's scores as they count for queries at `positions`.
fn visible(position: u32, positions: vec4<u32>, score: vec4<f32>) -> vec4<f32> {
    let seen = (vec4(position) <= positions) & (vec4(position + p.window) > positions);
    var scored = score * p.scale;
    if CAPPED {
        // Clamped, since tanh of large numbers is not settled.
        scored = p.soft_cap * tanh(clamp(scored / p.soft_cap, vec4(-15.0), vec4(15.0)));
    }
    return select(vec4(UNSEEN), scored, seen);
}

fn keep_visible(at: u32, position: u32, positions: vec4<u32>, block: mat4x4<f32>) {
    scores[at] = visible(position, positions, block[0]);
    scores[at + 1u] = visible(position + 1u, positions, block[1]);
    scores[at + 2u] = visible(position + 2u, positions, block[2]);
    scores[at + 3u] = visible(position + 3u, positions, block[3]);
}

@compute @workgroup_size(PARTS, GROUPS)
fn main(
    @builtin(workgroup_id) tile: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
) {
    let part = local.x;
    let head_quads = 4u * PARTS;
    let sequence = (p.first_sequence + tile.z) * p.seq_len; // its first query
    let keys = p.start + p.seq_len;
    let first_row = (p.first_tile + tile.x) * 4u * GROUPS;
    let rows = first_row + local.y * 4u + CORNERS;
    // Rows past the end repeat the last, since all threads must reach the barriers; they do not store.
    let tokens = sequence + min(rows, vec4(p.seq_len - 1u));
    let queries = (tokens * p.heads + tile.y) * head_quads;
    let kv_step = p.kv_heads * head_quads;
    let kv_start = (p.first_sequence + tile.z) * keys * kv_step + tile.y / (p.heads / p.kv_heads) * head_quads;
    let own_scores = local.y * KEYS;

    // The keys that some row of the tile sees.
    let first_position = p.start + first_row;
    let positions = p.start + rows;
    let start = select(0u, first_position + 1u - p.window, first_position + 1u > p.window);
    let end = min(first_position + 4u * GROUPS, keys);

    var largest = vec4(LOWEST);
    var sum = vec4<f32>();
    var sums0 = mat4x4<f32>(); // column r: dimensions of row r
    var sums1 = mat4x4<f32>();
    var sums2 = mat4x4<f32>();
    var sums3 = mat4x4<f32>();
    for (var first_key = start; first_key < end; first_key += KEYS) {
        for (var slot = part * 8u; slot < KEYS; slot += PARTS * 8u) {
            // Keys past the end repeat the last one; no row sees them, as they lie after it.
            let position = first_key + slot;
            let at0 = kv_start + min(position + CORNERS, vec4(keys - 1u)) * kv_step;
            let at1 = kv_start + min(position + 4u + CORNERS, vec4(keys - 1u)) * kv_step;
            var block0 = mat4x4<f32>();
            var block1 = mat4x4<f32>();
            for (var quad = 0u; quad < head_quads; quad++) {
                let of_rows = transpose(mat4x4<f32>(
                    q[queries.x + quad],
                    q[queries.y + quad],
                    q[queries.z + quad],
                    q[queries.w + quad],
                ));
                block0 += products(of_rows, at0 + quad);
                block1 += products(of_rows, at1 + quad);
            }
            keep_visible(own_scores + slot, position, positions, block0);
            keep_visible(own_scores + slot + 4u, position + 4u, positions, block1);
        }
        workgroupBarrier();
        let before = largest;
        for (var slot = 0u; slot < KEYS; slot++) {
            largest = max(largest, scores[own_scores + slot]);
        }
        let kept = exp(before - largest);
        sum *= kept;
        sums0 = scaled(sums0, kept);
        sums1 = scaled(sums1, kept);
        sums2 = scaled(sums2, kept);
        sums3 = scaled(sums3, kept);
        let count = min(KEYS, end - first_key);
        var at = kv_start + first_key * kv_step + part * 4u;
        for (var slot = 0u; slot < count; slot++) {
            let weight = exp(scores[own_scores + slot] - largest);
            sum += weight;
            sums0 += weighted(value(at), weight);
            sums1 += weighted(value(at + 1u), weight);
            sums2 += weighted(value(at + 2u), weight);
            sums3 += weighted(value(at + 3u), weight);
            at += kv_step;
        }
        workgroupBarrier();
    }
    let share = 1.0 / sum;
    for (var r = 0u; r < 4u; r++) {
        if rows[r] < p.seq_len {
            let result = queries[r] + part * 4u;
            out[result] = sums0[r] * share[r];
            out[result + 1u] = sums1[r] * share[r];
            out[result + 2u] = sums2[r] * share[r];
            out[result + 3u] = sums3[r] * share[r];
        }
    }
}
