// Takes a tile of logits into each row's running log-sum-exp: the largest logit so far, the sum of
// exp(logit - largest), and the target's logit when the tile has it.
//
// Dispatch: LANES threads per row, 64 in a workgroup, unfolded over x and y.
// CPU twin: src/kernels/cross_entropy.rs.
#import reduce

struct Params {
    rows: u32,
    // The tile holds the vocabulary entries first..first + count.
    first: u32,
    count: u32,
    // Elements from one row of logits to the next.
    stride: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>; // [rows, count], rows stride apart
@group(0) @binding(2) var<storage, read> targets: array<u32>; // [rows]
@group(0) @binding(3) var<storage, read_write> state: array<vec4<f32>>; // [rows]: largest, sum, target's

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = (group.y * groups.x + group.x) * (64u / LANES) + local / LANES;
    // Threads past the last row repeat it, since all must reach the barriers, and do not store.
    let reading = min(row, p.rows - 1u);
    let start = reading * p.stride;
    let lane = local % LANES;
    let before = state[reading];
    var largest = before.x;
    for (var i = lane; i < p.count; i += LANES) {
        largest = max(largest, logits[start + i]);
    }
    largest = row_max(largest, local);
    var sum = 0.0;
    for (var i = lane; i < p.count; i += LANES) {
        sum += exp(logits[start + i] - largest);
    }
    sum = row_sum(sum, local);
    if lane == 0u && row < p.rows {
        // A target below `first` wraps round to a large number.
        let place = targets[row] - p.first;
        let of_target = select(before.z, logits[start + min(place, p.count - 1u)], place < p.count);
        state[row] = vec4(largest, before.y * exp(before.x - largest) + sum, of_target, 0.0);
    }
}
