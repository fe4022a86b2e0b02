// gate = silu(gate) * up with silu(x) = x / (1 + exp(-x)), four elements per thread.
//
// Dispatch: one workgroup per 64 quads, unfolded over x and y. CPU twin: src/kernels/swiglu.rs.
struct Params {
    quads: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> up: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> gate: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let quad = (group.y * groups.x + group.x) * 64u + local;
    if quad < p.quads {
        let x = gate[quad];
        // Clamped, since a shader may do anything with infinity.
        gate[quad] = x / (1.0 + exp(min(-x, vec4(88.0)))) * up[quad];
    }
}
