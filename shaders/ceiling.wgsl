// What a device can do at best, to hold kernels against: y = x, or with STEPS multiplications and
// additions in registers between load and store.
//
// Dispatch: a workgroup for each 256 quads, unfolded over x and y. CPU twin: src/kernels/ceiling.rs.
override STEPS: u32 = 0u;

struct Params {
    factor: f32,
    summand: f32,
    // Quads of x, a multiple of 256.
    quads: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = (group.y * groups.x + group.x) * 256u + local;
    if at >= p.quads {
        return;
    }
    var a = x[at];
    var b = x[at + 64u];
    var c = x[at + 128u];
    var d = x[at + 192u];
    for (var step = 0u; step < STEPS; step++) {
        a = a * p.factor + p.summand;
        b = b * p.factor + p.summand;
        c = c * p.factor + p.summand;
        d = d * p.factor + p.summand;
    }
    y[at] = a;
    y[at + 64u] = b;
    y[at + 128u] = c;
    y[at + 192u] = d;
}
