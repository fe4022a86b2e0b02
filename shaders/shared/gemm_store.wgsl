// One output of gemm. With beta = 0 the old value is not read: it may be anything, NaN included.
fn store(i: u32, j: u32, acc: f32) {
    if j >= p.n {
        return;
    }
    let at = p.c_offset + i * p.c_row + j;
    var value = p.alpha * acc;
    if p.has_bias != 0u {
        value += bias[j];
    }
    if p.beta != 0.0 {
        value += p.beta * c[at];
    }
    c[at] = value;
}
