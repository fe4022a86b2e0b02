// Scales and zero points of groups of weights (see src/kernels/scales.rs for what they mean).
//
// A thread has one group of one row. It searches four sizes of the grid at a time, in both signs
// where the grid is symmetric, so that each weight it loads serves up to eight candidates.
//
// Dispatch: a thread per group and row from `first` on, 64 in a workgroup, unfolded over x and y.
// CPU twin: src/kernels/scales.rs.
#import round_scale

struct Params {
    ld: u32, // columns of w
    c0: u32, // the first column
    cols: u32, // how many
    group: u32, // columns in a group; the last may be shorter
    row_groups: u32, // groups of these columns
    groups: u32, // groups of the whole grid
    group0: u32, // the first of these groups in the grid
    maxq: f32,
    middle: f32, // the zero point of symmetric grids
    // The groups of this dispatch, counted through all rows.
    first: u32,
    end: u32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> w: array<f32>; // [rows, ld]
@group(0) @binding(2) var<storage, read> importance: array<f32>; // [ld]
@group(0) @binding(3) var<storage, read_write> scales: array<f32>; // [rows, groups]
@group(0) @binding(4) var<storage, read_write> zeros: array<f32>; // [rows, groups]

override FIT: u32 = 0u;
override SYM: bool = true;

const MIN_MAX: u32 = 0u;
const MSE: u32 = 1u;

// Scale and zero point of the grid that spans low..high, both shrunk to `size` of themselves.
fn min_max(low: f32, high: f32, size: f32) -> vec2<f32> {
    if SYM {
        let span = max(high, -low) * size;
        return vec2(round_scale(2.0 * span / p.maxq), p.middle);
    }
    let scale = round_scale((high * size - low * size) / p.maxq);
    let zero = round(-(low * size) / scale);
    if zero >= 1.0 {
        return vec2(scale, min(zero, p.maxq));
    }
    return vec2(round_scale(high * size / (p.maxq - 1.0)), 1.0);
}

// x^2.4 for x >= 0. The square is exact but for one rounding; a step of Newton's method on
// y^5 = x^2 makes up for devices whose exp2 and log2 are coarse.
fn power(x: f32) -> f32 {
    let square = x * x;
    if square < 1e-30 {
        return 0.0;
    }
    let guess = exp2(0.4 * log2(x));
    let guess2 = guess * guess;
    return square * (0.8 * guess + 0.2 * (square / (guess2 * guess2)));
}

struct Losses {
    plus: vec4<f32>,
    minus: vec4<f32>,
}

// What the weights lose when rounded to four grids, one in each component, and to the same with
// their scales negated: the same quotients, cut off at mirrored ends.
fn losses(start: u32, column0: u32, scale: vec4<f32>, zero: vec4<f32>, columns: u32) -> Losses {
    let inverse = 1.0 / scale;
    let low = -zero;
    let high = vec4(p.maxq) - zero;
    var sums = Losses(vec4<f32>(), vec4<f32>());
    for (var i = 0u; i < columns; i++) {
        let value = w[start + i];
        if FIT == MSE {
            let miss = abs(value - scale * clamp(round(value / scale), low, high));
            sums.plus += vec4(power(miss.x), power(miss.y), power(miss.z), power(miss.w));
        } else {
            let code = round(value * inverse);
            let plus = value - scale * clamp(code, low, high);
            sums.plus += importance[column0 + i] * (plus * plus);
            if SYM {
                let minus = value - scale * clamp(code, -high, -low);
                sums.minus += importance[column0 + i] * (minus * minus);
            }
        }
    }
    return sums;
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
    let row = at / p.row_groups;
    let g = at % p.row_groups;
    let column0 = p.c0 + g * p.group;
    let columns = min(p.group, p.cols - g * p.group);
    let start = row * p.ld + column0;
    var low = 0.0;
    var high = 0.0;
    for (var i = 0u; i < columns; i++) {
        low = min(low, w[start + i]);
        high = max(high, w[start + i]);
    }
    var best = min_max(low, high, 1.0);
    if low == 0.0 && high == 0.0 {
        best = vec2(1.0, p.middle);
    } else if FIT != MIN_MAX {
        let largest = select(1.05, 1.0, FIT == MSE);
        let steps = select(81u, 80u, FIT == MSE);
        var least = 3.4e38;
        for (var step = 0u; step < steps; step += 4u) {
            // Steps past the last repeat it, which changes nothing.
            let candidates = min(vec4(step) + vec4(0u, 1u, 2u, 3u), vec4(steps - 1u));
            let size = largest - vec4<f32>(candidates) / 100.0;
            let grid0 = min_max(low, high, size.x);
            let grid1 = min_max(low, high, size.y);
            let grid2 = min_max(low, high, size.z);
            let grid3 = min_max(low, high, size.w);
            let scale = vec4(grid0.x, grid1.x, grid2.x, grid3.x);
            let zero = vec4(grid0.y, grid1.y, grid2.y, grid3.y);
            let lost = losses(start, column0, scale, zero, columns);
            for (var c = 0u; c < 4u; c++) {
                if lost.plus[c] < least {
                    least = lost.plus[c];
                    best = vec2(scale[c], zero[c]);
                }
                if SYM && FIT != MSE && lost.minus[c] < least {
                    least = lost.minus[c];
                    best = vec2(-scale[c], zero[c]);
                }
            }
        }
    }
    scales[row * p.groups + p.group0 + g] = best.x;
    zeros[row * p.groups + p.group0 + g] = best.y;
}
