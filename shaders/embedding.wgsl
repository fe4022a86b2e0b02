// Rows of an embedding table chunk by token id; one dispatch per chunk writes the rows that the
// chunk has and leaves the others.
//
// Dispatch: a thread per quad of the result, 64 in a workgroup, unfolded over x and y.
// CPU twin: src/kernels/embedding.rs.
#import unpack

struct Params {
    tokens: u32,
    row_quads: u32,
    // The chunk holds the ids first..first + count.
    first: u32,
    count: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> table: array<vec4<u32>>; // [count, d], packed as ELEM says
@group(0) @binding(2) var<storage, read> ids: array<u32>; // [tokens]
@group(0) @binding(3) var<storage, read_write> rows: array<vec4<f32>>; // [tokens, d]

override ELEM: u32 = 0u;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = (group.y * groups.x + group.x) * 64u + local;
    let token = at / p.row_quads;
    if token >= p.tokens {
        return;
    }
    // An id below `first` wraps round to a large number.
    let row = ids[token] - p.first;
    if row < p.count {
        let quad = row * p.row_quads + at % p.row_quads;
        rows[at] = unpack4(table[quad_index(quad, ELEM)], quad, ELEM);
    }
}
