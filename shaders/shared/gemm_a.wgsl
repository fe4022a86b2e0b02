// Loads of 4x4 blocks of A [m, k], for all forms of gemm that work on blocks.
//
// A quad is four consecutive elements of a stored row, counted in fours from the start of the
// buffer, so offsets and stored rows must be multiples of four elements (m and k need not be).
// A block is four quads. Blocks past the right or lower edge repeat the last row or quad: what is
// computed from them is not stored.

override A_TRANSPOSED: bool = false; // A is stored as [k, m]

const CORNERS = vec4<u32>(0u, 1u, 2u, 3u);

// The four quads of a stored matrix whose rows `row`.. (four of them, at most `last_row`) and
// columns `col`.. (the quad at most that of `last_col`) are wanted.
fn quads(offset: u32, stride: u32, row: u32, last_row: u32, col: u32, last_col: u32) -> vec4<u32> {
    let rows = min(vec4(row) + CORNERS, vec4(last_row));
    return vec4((offset + min(col, last_col)) / 4u) + rows * (stride / 4u);
}

// A[i.., l..]
fn a_quads(i: u32, l: u32) -> vec4<u32> {
    if A_TRANSPOSED {
        return quads(p.a_offset, p.a_col, l, p.k - 1u, i, p.m - 1u);
    }
    return quads(p.a_offset, p.a_row, i, p.m - 1u, l, p.k - 1u);
}

// How far a block's quads move for four steps along k.
fn a_quad_step() -> vec4<u32> {
    return vec4(select(1u, p.a_col, A_TRANSPOSED));
}

// The transpose of a block of A: column r is A[i + r, l..].
fn a_block(at: vec4<u32>) -> mat4x4<f32> {
    let block = mat4x4<f32>(a[at.x], a[at.y], a[at.z], a[at.w]);
    if A_TRANSPOSED {
        return transpose(block);
    }
    return block;
}

// The last block along k, with zeros past the end of k, on the side of B too: what is stored there belongs
// to others and may be NaN.
fn a_edge_block(i: u32, l: u32) -> mat4x4<f32> {
    let inside = vec4(l) + CORNERS < vec4(p.k);
    let block = a_block(a_quads(i, l));
    let zero = vec4<f32>();
    return mat4x4<f32>(
        select(zero, block[0], inside),
        select(zero, block[1], inside),
        select(zero, block[2], inside),
        select(zero, block[3], inside),
    );
}
