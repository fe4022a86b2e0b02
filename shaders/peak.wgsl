// The largest of a row of logits, which it is, and the sum of exp(logit - largest): a round that folds
// `count` findings (at first logits, later what a round before found) into `outputs`.
//
// Of equal logits the one with the smaller number counts.
//
// Dispatch: a thread per output, 64 in a workgroup, unfolded over x and y. CPU twin: src/kernels/peak.rs.
struct Params {
    count: u32,
    outputs: u32,
    // Multiplies the logits: 1 / temperature.
    scale: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> found: array<u32>; // f32 logits [count], or as `result`
@group(0) @binding(2) var<storage, read_write> result: array<vec4<u32>>; // [outputs]: f32 largest, its number, f32 sum

override FIRST: bool = false;
override SUMS: bool = true; // whether the sum is wanted

// Below every finite number; nothing above it was seen where the number is NONE.
const LOWEST: f32 = -3.4e38;
const NONE: u32 = 0xffffffffu;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = (group.y * groups.x + group.x) * 64u + local;
    if at >= p.outputs {
        return;
    }
    var largest = LOWEST;
    var number = NONE;
    var sum = 0.0;
    for (var i = at; i < p.count; i += p.outputs) {
        var value = 0.0;
        var its = i;
        var part = 1.0;
        if FIRST {
            value = bitcast<f32>(found[i]) * p.scale;
        } else {
            value = bitcast<f32>(found[4u * i]);
            its = found[4u * i + 1u];
            part = bitcast<f32>(found[4u * i + 2u]);
        }
        let before = largest;
        largest = max(largest, value);
        if SUMS {
            sum = sum * exp(before - largest) + part * exp(value - largest);
        }
        if value > before || value == before && its < number {
            number = its;
        }
    }
    result[at] = vec4(bitcast<u32>(largest), number, bitcast<u32>(sum), 0u);
}
