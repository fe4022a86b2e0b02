// What all forms of gemm do with a finished sum.

// Whether all outputs of a tile lie where nothing is wanted: `i` is its last row, `j` its first
// column.
fn above_diagonal(i: u32, j: u32) -> bool {
    return p.lower != 0u && p.row0 + i < p.col0 + j;
}

// With beta = 0 the old value is not read: it may be anything, NaN included.
fn store(i: u32, j: u32, acc: f32) {
    let at = p.c_offset + i * p.c_row + j;
    var value = p.alpha * acc;
    if p.has_bias != 0u {
        value += bias[p.col0 + j];
    }
    if p.beta != 0.0 {
        value += p.beta * c[at];
    }
    c[at] = value;
}

// Column r of `block` is C[i + r, j..].
fn store_block(i: u32, j: u32, block: mat4x4<f32>) {
    if i >= p.m || j >= p.n {
        return;
    }
    // Loops whose ends are not known are not unrolled: sixteen copies of the above take software
    // adapters seconds to compile.
    var rows = block;
    for (var r = 0u; r < min(4u, p.m - i); r++) {
        var row = rows[r];
        for (var s = 0u; s < min(4u, p.n - j); s++) {
            store(i + r, j + s, row[s]);
        }
    }
}
