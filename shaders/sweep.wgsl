// The inner loop of GPTQ on one block of columns: round a column, spread its error over the columns
// of the block that are still to come (see src/kernels/sweep.rs).
//
// A thread has a row and takes its columns from last to first, four at a time. What the errors of
// columns done before add to a column is subtracted when its turn comes, error by error in the order
// in which they were made, so that the arithmetic is that of the textbook loop and a weight stays in
// a register. The errors stay in workgroup memory, which no two threads share: there are no barriers.
//
// Dispatch: 32 rows in a workgroup, unfolded over x and y. CPU twin: src/kernels/sweep.rs.

struct Params {
    n: u32, // columns of w, a multiple of four
    start: u32, // first column of the block
    width: u32, // columns of the block, a multiple of four, at most 128
    groups: u32,
    maxq: f32,
    has_compensation: u32,
    has_inverse: u32,
    // The rows of this dispatch.
    first: u32,
    end: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> w: array<vec4<f32>>; // [rows, n]
@group(0) @binding(2) var<storage, read> compensation: array<vec4<f32>>; // [rows, width], if there is any
@group(0) @binding(3) var<storage, read> inverse: array<vec4<f32>>; // [width, width], if errors are spread
@group(0) @binding(4) var<storage, read> columns: array<vec2<u32>>; // [n]: natural column, group
@group(0) @binding(5) var<storage, read> scales: array<f32>; // [rows, groups]
@group(0) @binding(6) var<storage, read> zeros: array<f32>; // [rows, groups]
@group(0) @binding(7) var<storage, read_write> codes: array<u32>; // [rows, n], four bytes in a word
@group(0) @binding(8) var<storage, read_write> loss: array<f32>; // [rows]

const ROWS: u32 = 32u;
const WIDTH: u32 = 128u;

var<workgroup> errors: array<f32, WIDTH * ROWS>; // [column, row], divided by the pivots

@compute @workgroup_size(ROWS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let row = p.first + (group.y * groups.x + group.x) * ROWS + local;
    if row >= p.end {
        return;
    }
    let quads = p.width / 4u;
    let w_row = (row * p.n + p.start) / 4u;
    var row_loss = 0.0;
    for (var quad = quads; quad > 0u; ) {
        quad--;
        let original = w[w_row + quad];
        var current = original;
        if p.has_compensation != 0u {
            current += compensation[row * quads + quad];
        }
        if p.has_inverse != 0u {
            for (var j = p.width; j > 4u * quad + 4u; ) {
                j--;
                current -= errors[j * ROWS + local] * inverse[j * quads + quad];
            }
        }
        var left = vec4<f32>();
        for (var lane = 4u; lane > 0u; ) {
            lane--;
            let j = 4u * quad + lane;
            let column = columns[p.start + j];
            let scale = scales[row * p.groups + column.y];
            let zero = zeros[row * p.groups + column.y];
            let code = clamp(round(current[lane] / scale) + zero, 0.0, p.maxq);
            let value = scale * (code - zero);
            left[lane] = original[lane] - value;

            let byte = row * p.n + column.x;
            let shift = 8u * (byte % 4u);
            codes[byte / 4u] = (codes[byte / 4u] & ~(0xffu << shift)) | (u32(code) << shift);

            if p.has_inverse != 0u {
                let factors = inverse[j * quads + quad];
                let error = (current[lane] - value) / factors[lane];
                row_loss += error * error;
                errors[j * ROWS + local] = error;
                // Of the four, those at `lane` and after are done and no longer looked at.
                current -= error * factors;
            }
        }
        w[w_row + quad] = left;
    }
    if p.has_inverse != 0u {
        loss[row] += row_loss;
    }
}
