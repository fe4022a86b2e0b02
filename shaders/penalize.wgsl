// The repetition penalty (Keskar et al. 2019, arXiv 1909.05858): logits of the tokens in `ids` that are
// positive are divided by it, others multiplied.
//
// Dispatch: a thread per id, which occur once, 64 in a workgroup, unfolded over x and y.
// CPU twin: src/kernels/penalize.rs.
struct Params {
    count: u32,
    penalty: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>; // [count]
@group(0) @binding(2) var<storage, read_write> logits: array<f32>; // [vocab]

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
    let id = ids[at];
    let logit = logits[id];
    logits[id] = select(logit * p.penalty, logit / p.penalty, logit > 0.0);
}
