// Columns of a weight in another order, widened to f32: out[r][j] = w[r][columns[j]].
//
// Dispatch: a thread per element of the result from `first` on, 64 in a workgroup, unfolded over x
// and y. CPU twin: src/kernels/columns.rs.
#import unpack

struct Params {
    n: u32, // columns of w
    m: u32, // columns of the result
    // The elements of the result that this dispatch writes.
    first: u32,
    end: u32,
}

const ZERO_COLUMN: u32 = 0xffffffffu;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> w: array<u32>; // [rows, n], packed as ELEM says
@group(0) @binding(2) var<storage, read> columns: array<u32>; // [m]
@group(0) @binding(3) var<storage, read_write> gathered: array<f32>; // [rows, m]

override ELEM: u32 = 0u;

fn load(at: u32) -> f32 {
    if ELEM == ELEM_F32 {
        return bitcast<f32>(w[at]);
    }
    return unpack2(w[at >> 1u], ELEM)[at & 1u];
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let at = p.first + (group.y * groups.x + group.x) * 64u + local;
    if at >= p.end {
        return;
    }
    let column = columns[at % p.m];
    var value = 0.0;
    if column != ZERO_COLUMN {
        value = load(at / p.m * p.n + column);
    }
    gathered[at] = value;
}
