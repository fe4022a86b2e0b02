// Factor and inverse of one small square: A = L L^T, L lower triangular, and L^-1.
//
// Thread i has row i of L. Column by column (left-looking), with one barrier for each: the pivot is
// found by every thread for itself rather than waited for. Thread c then has column c of the
// inverse, by forward substitution, with no barrier at all. Everything stays in storage memory: the
// square of 128 is four times as large as the workgroup memory that every device has.
//
// Dispatch: one workgroup. CPU twin: src/kernels/cholesky.rs.

struct Params {
    w: u32, // at most 128
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> block: array<f32>; // [>= w, w], lower half of the top square
@group(0) @binding(2) var<storage, read_write> factor: array<f32>; // [w, w]
// [w, w]; holds the transpose of the factor until that is finished, so that neighbouring threads
// read neighbouring words.
@group(0) @binding(3) var<storage, read_write> inverse: array<f32>;
@group(0) @binding(4) var<storage, read_write> status: array<u32>; // [1]

// Positive, and neither subnormal nor infinite. By its bits, because compilers may take it that no
// number is ever infinite or NaN.
fn is_good(pivot: f32) -> bool {
    let bits = bitcast<u32>(pivot);
    return bits >= 0x00800000u && bits < 0x7f800000u;
}

@compute @workgroup_size(128)
fn main(@builtin(local_invocation_index) thread: u32) {
    let w = p.w;
    let i = min(thread, w - 1u);
    let mine = thread < w;
    var all_good = true;
    for (var j = 0u; j < w; j++) {
        var dot = 0.0;
        var norm = 0.0;
        if i >= j {
            for (var k = 0u; k < j; k++) {
                let pivot_row = inverse[k * w + j];
                dot += inverse[k * w + i] * pivot_row;
                norm += pivot_row * pivot_row;
            }
        }
        let rest = block[j * w + j] - norm;
        let good = is_good(rest);
        // Only threads at or below the diagonal know the pivot; the last one knows them all.
        all_good = all_good && (good || i < j);
        let pivot = sqrt(select(1.0, rest, good));
        var value = 0.0;
        if i == j {
            value = pivot;
        } else if i > j && good {
            value = (block[i * w + j] - dot) / pivot;
        }
        if mine {
            factor[i * w + j] = value;
            inverse[j * w + i] = value;
        }
        storageBarrier();
    }
    if thread == w - 1u && !all_good {
        status[0] = 1u;
    }
    if !mine {
        return;
    }
    let c = thread;
    for (var row = 0u; row < w; row++) {
        var value = 0.0;
        if row == c {
            value = 1.0 / factor[row * w + row];
        } else if row > c {
            var sum = 0.0;
            for (var k = c; k < row; k++) {
                sum += factor[row * w + k] * inverse[k * w + c];
            }
            value = -sum / factor[row * w + row];
        }
        inverse[row * w + c] = value;
    }
}
