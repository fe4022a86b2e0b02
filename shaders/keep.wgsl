// Rows of f32 into a cache of f32 or f16, four elements per thread.
//
// Dispatch: one workgroup per 64 quads, unfolded over x and y. CPU twin: src/kernels/keep.rs.
#import unpack

struct Params {
    quads: u32,
    // Where in the cache the first one goes, in quads.
    start: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> cache: array<u32>; // as ELEM

override ELEM: u32 = 1u; // of the cache, see `unpack`: f32 or f16

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let quad = (group.y * groups.x + group.x) * 64u + local;
    if quad >= p.quads {
        return;
    }
    let value = x[quad];
    let to = p.start + quad;
    if ELEM == ELEM_F32 {
        for (var i = 0u; i < 4u; i++) {
            cache[4u * to + i] = bitcast<u32>(value[i]);
        }
        return;
    }
    cache[2u * to] = pack2x16float(value.xy);
    cache[2u * to + 1u] = pack2x16float(value.zw);
}
