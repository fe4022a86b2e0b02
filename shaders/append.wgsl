// New tokens into a cache of keys and values: queries and keys are normalized per head (where the
// model does) and turned by their position, keys and values go to their rows of the cache.
//
// Every thread sums the squares of its own head, so none waits for another.
//
// Dispatch: a thread per four pairs of a head, 64 in a workgroup, unfolded over x and y.
// CPU twin: src/kernels/append.rs.
#import unpack

struct Params {
    tokens: u32,
    heads: u32,
    kv_heads: u32,
    // Quads in half a head.
    half: u32,
    // Position of the first token, and its row in the cache.
    start: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> qkv: array<vec4<f32>>; // [tokens, heads + 2 kv_heads, d]
@group(0) @binding(2) var<storage, read> table: array<vec4<f32>>; // [positions, cosines then sines]
@group(0) @binding(3) var<storage, read> norms: array<vec4<f32>>; // [2, d]: of q, of k
@group(0) @binding(4) var<storage, read_write> q: array<vec4<f32>>; // [tokens, heads, d]
@group(0) @binding(5) var<storage, read_write> keys: array<u32>; // [rows, kv_heads, d] as ELEM
@group(0) @binding(6) var<storage, read_write> values: array<u32>; // the same

override ELEM: u32 = 1u; // of the cache, see `unpack`: f32 or f16
override NORMED: bool = false;

fn keep_key(quad: u32, value: vec4<f32>) {
    if ELEM == ELEM_F32 {
        for (var i = 0u; i < 4u; i++) {
            keys[4u * quad + i] = bitcast<u32>(value[i]);
        }
        return;
    }
    keys[2u * quad] = pack2x16float(value.xy);
    keys[2u * quad + 1u] = pack2x16float(value.zw);
}

fn keep_value(quad: u32, value: vec4<f32>) {
    if ELEM == ELEM_F32 {
        for (var i = 0u; i < 4u; i++) {
            values[4u * quad + i] = bitcast<u32>(value[i]);
        }
        return;
    }
    values[2u * quad] = pack2x16float(value.xy);
    values[2u * quad + 1u] = pack2x16float(value.zw);
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = (group.y * groups.x + group.x) * 64u + local;
    let all_heads = p.heads + 2u * p.kv_heads;
    let row = at / p.half; // of all tokens' heads
    let token = row / all_heads;
    if token >= p.tokens {
        return;
    }
    let head = row % all_heads;
    let quad = at % p.half;
    let head_quads = 2u * p.half;
    let own = row * head_quads;
    var a = qkv[own + quad];
    var b = qkv[own + quad + p.half];
    let cache_row = (p.start + token) * p.kv_heads * head_quads;
    if head >= p.heads + p.kv_heads {
        let to = cache_row + (head - p.heads - p.kv_heads) * head_quads + quad;
        keep_value(to, a);
        keep_value(to + p.half, b);
        return;
    }
    if NORMED {
        var squares = 0.0;
        for (var i = 0u; i < head_quads; i++) {
            squares += dot(qkv[own + i], qkv[own + i]);
        }
        let scale = 1.0 / sqrt(squares / f32(4u * head_quads) + p.eps);
        let norm = select(0u, head_quads, head >= p.heads) + quad;
        a *= scale * norms[norm];
        b *= scale * norms[norm + p.half];
    }
    let angle = (p.start + token) * head_quads + quad;
    let cosine = table[angle];
    let sine = table[angle + p.half];
    let first = a * cosine - b * sine;
    let second = b * cosine + a * sine;
    if head < p.heads {
        let to = (token * p.heads + head) * head_quads + quad;
        q[to] = first;
        q[to + p.half] = second;
        return;
    }
    let to = cache_row + (head - p.heads) * head_quads + quad;
    keep_key(to, first);
    keep_key(to + p.half, second);
}
