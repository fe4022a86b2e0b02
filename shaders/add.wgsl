// x += scale * y, four elements per thread.
//
// Dispatch: one workgroup per 64 quads, unfolded over x and y. CPU twin: src/kernels/add.rs.
struct Params {
    quads: u32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> y: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let quad = (group.y * groups.x + group.x) * 64u + local;
    if quad < p.quads {
        x[quad] += p.scale * y[quad];
    }
}
