// Adds the sum of magnitudes of each column to a running sum: sums[j] += sum over rows of |x[r][j]|.
//
// Dispatch: a thread per column, 64 in a workgroup, for some rows.
// CPU twin: src/kernels/magnitude.rs.
struct Params {
    n: u32,
    // The rows that this dispatch sums.
    first: u32,
    end: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // [rows, n]
@group(0) @binding(2) var<storage, read_write> sums: array<f32>; // [n]

// Magnitudes that are added up before their sum is added to the others': a sum of sums loses less to
// rounding than one long sum.
const RUN: u32 = 32u;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let column = id.x;
    if column >= p.n {
        return;
    }
    var total = 0.0;
    for (var begin = p.first; begin < p.end; begin += RUN) {
        var part = 0.0;
        let end = min(begin + RUN, p.end);
        for (var row = begin; row < end; row += 1u) {
            part += abs(x[row * p.n + column]);
        }
        total += part;
    }
    sums[column] += total;
}
