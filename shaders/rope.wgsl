// Rotary position embedding in place: elements i and i + d/2 of each head turn by the angle of
// their position.
//
// Dispatch: a thread per four pairs, 64 in a workgroup, unfolded over x and y.
// CPU twin: src/kernels/rope.rs.
struct Params {
    tokens: u32,
    heads: u32,
    // Quads in half a head.
    half: u32,
    seq_len: u32,
    // Position of each sequence's first token.
    start: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> table: array<vec4<f32>>; // [positions, cosines then sines]
@group(0) @binding(2) var<storage, read_write> x: array<vec4<f32>>; // [tokens, heads, d]

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = (group.y * groups.x + group.x) * 64u + local;
    let head = at / p.half; // of all tokens' heads
    let token = head / p.heads;
    if token >= p.tokens {
        return;
    }
    let quad = at % p.half;
    let angle = (p.start + token % p.seq_len) * 2u * p.half + quad;
    let cosine = table[angle];
    let sine = table[angle + p.half];
    let first = head * 2u * p.half + quad;
    let second = first + p.half;
    let a = x[first];
    let b = x[second];
    x[first] = a * cosine - b * sine;
    x[second] = b * cosine + a * sine;
}
