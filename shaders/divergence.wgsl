// How far two models' predictions for the same place are apart: the Kullback-Leibler divergence of their
// softmaxes, each one's negative log-likelihood of the token that follows, and each one's most likely token.
//
// Dispatch: LANES threads per row, 64 in a workgroup, unfolded over x and y.
// CPU twin: src/kernels/divergence.rs.
#import reduce

struct Params {
    vocab: u32,
    // The rows that this dispatch compares.
    first: u32,
    end: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> a: array<f32>; // [rows, vocab]
@group(0) @binding(2) var<storage, read> b: array<f32>; // [rows, vocab]
@group(0) @binding(3) var<storage, read> targets: array<u32>; // [rows]
// [rows, 2]: divergence, a's and b's negative log-likelihood, unused; a's and b's token, unused
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = p.first + (group.y * groups.x + group.x) * (64u / LANES) + local / LANES;
    // Threads past the last row repeat it, since all must reach the barriers, and do not store.
    let start = min(row, p.end - 1u) * p.vocab;
    let lane = local % LANES;
    var top = vec2(a[start], b[start]);
    var place = vec2(0u, 0u);
    for (var i = lane; i < p.vocab; i += LANES) {
        let logits = vec2(a[start + i], b[start + i]);
        place = select(place, vec2(i, i), logits > top);
        top = max(top, logits);
    }
    let largest = vec2(row_max(top.x, local), row_max(top.y, local));
    // Of equal logits the first counts. Numbers below 2^24 are exact in f32.
    let place_a = -row_max(select(-16777216.0, -f32(place.x), top.x == largest.x), local);
    let place_b = -row_max(select(-16777216.0, -f32(place.y), top.y == largest.y), local);
    var sums = vec3(0.0, 0.0, 0.0);
    for (var i = lane; i < p.vocab; i += LANES) {
        let logits = vec2(a[start + i], b[start + i]) - largest;
        let powers = exp(logits);
        sums += vec3(powers, powers.x * (logits.x - logits.y));
    }
    let sum = vec2(row_sum(sums.x, local), row_sum(sums.y, local));
    let weighted = row_sum(sums.z, local);
    if lane == 0u && row < p.end {
        let logs = log(sum);
        let followed = vec2(a[start + targets[row]], b[start + targets[row]]) - largest;
        let divergence = max(weighted / sum.x - (logs.x - logs.y), 0.0);
        out[2u * row] = vec4(divergence, logs - followed, 0.0);
        out[2u * row + 1u] = vec4(place_a, place_b, 0.0, 0.0);
    }
}
