// Adds the sum of squares of each row, or of the differences of two rows, to a running sum.
//
// Dispatch: LANES threads per row, 64 in a workgroup, unfolded over x and y.
// CPU twin: src/kernels/norm.rs.
#import reduce

struct Params {
    n: u32,
    // The rows that this dispatch sums.
    first: u32,
    end: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>; // [rows, n]
@group(0) @binding(2) var<storage, read> y: array<f32>; // [rows, n], read only with MINUS
@group(0) @binding(3) var<storage, read_write> sums: array<f32>; // [rows]

// 1 for the squares of x - y.
override MINUS: u32 = 0u;

// Squares that one thread adds up before it adds their sum to the others': a sum of sums loses less
// to rounding than one long sum.
const RUN: u32 = 32u;

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = p.first + (group.y * groups.x + group.x) * (64u / LANES) + local / LANES;
    // Threads past the last row repeat it, since all must reach the barriers, and do not store.
    let start = min(row, p.end - 1u) * p.n;
    var squares = 0.0;
    for (var begin = local % LANES; begin < p.n; begin += RUN * LANES) {
        var part = 0.0;
        let end = min(begin + RUN * LANES, p.n);
        for (var column = begin; column < end; column += LANES) {
            var value = x[start + column];
            if MINUS == 1u {
                value -= y[start + column];
            }
            part += value * value;
        }
        squares += part;
    }
    let total = row_sum(squares, local);
    if row < p.end && local % LANES == 0u {
        sums[row] += total;
    }
}
