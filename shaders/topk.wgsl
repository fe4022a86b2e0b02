// The largest K of each piece of a list of logits, in falling order: a round.
//
// A thread counts how many of its piece come before its own, which is its place; so no thread waits for
// another, and the outcome does not depend on their order. Of equal logits the one with the smaller
// number comes first. Logits are compared as whole numbers that rise with them: a total order, whatever
// a compiler thinks of NaN.
//
// Dispatch: a thread per element, 64 in a workgroup, unfolded over x and y. CPU twin: src/kernels/topk.rs.
struct Params {
    count: u32,
    // Elements of a piece, a multiple of 64.
    piece: u32,
    k: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> from_: array<u32>; // f32 logits [count], or pairs as `to`
@group(0) @binding(2) var<storage, read_write> to: array<vec2<u32>>; // [pieces * k]: f32 logit, its number

override FIRST: bool = false;

fn logit(i: u32) -> u32 {
    if FIRST {
        return from_[i];
    }
    return from_[2u * i];
}

fn rising(bits: u32) -> u32 {
    return bits ^ select(0x80000000u, 0xffffffffu, bits >= 0x80000000u);
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = (group.y * groups.x + group.x) * 64u + local;
    if at >= p.count {
        return;
    }
    let start = at / p.piece * p.piece;
    let end = min(start + p.piece, p.count);
    let bits = logit(at);
    let own = rising(bits);
    var place = 0u;
    for (var i = start; i < end; i++) {
        let other = rising(logit(i));
        place += u32(other > own || other == own && i < at);
    }
    if place < p.k {
        var number = at;
        if !FIRST {
            number = from_[2u * at + 1u];
        }
        to[at / p.piece * p.k + place] = vec2(bits, number);
    }
}
