// Sums and maxima over the LANES threads that share a row; a workgroup of 64 has 64 / LANES rows.
// LANES is a power of two. With one thread per row there is no barrier, which software adapters
// pay dearly for.
override LANES: u32 = 64u;

var<workgroup> lanes: array<f32, 64>;

// The sum of `value` over the threads of a row, in a fixed order. `local` counts the workgroup's
// threads; all of them must come here.
fn row_sum(value: f32, local: u32) -> f32 {
    if LANES == 1u {
        return value;
    }
    lanes[local] = value;
    workgroupBarrier();
    for (var width = LANES / 2u; width > 0u; width /= 2u) {
        if local % LANES < width {
            lanes[local] += lanes[local + width];
        }
        workgroupBarrier();
    }
    let total = lanes[local / LANES * LANES];
    workgroupBarrier();
    return total;
}

// The largest `value`, likewise.
fn row_max(value: f32, local: u32) -> f32 {
    if LANES == 1u {
        return value;
    }
    lanes[local] = value;
    workgroupBarrier();
    for (var width = LANES / 2u; width > 0u; width /= 2u) {
        if local % LANES < width {
            lanes[local] = max(lanes[local], lanes[local + width]);
        }
        workgroupBarrier();
    }
    let largest = lanes[local / LANES * LANES];
    workgroupBarrier();
    return largest;
}
