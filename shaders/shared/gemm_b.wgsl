// Loads of 4x4 blocks of B [k, n] as gemm_a has those of A.

override ELEM: u32 = 0u;
override B_TRANSPOSED: bool = false; // B is stored as [n, k]

// B[l.., j..]
fn b_quads(l: u32, j: u32) -> vec4<u32> {
    if B_TRANSPOSED {
        return quads(p.b_offset, p.b_col, j, p.n - 1u, l, p.k - 1u);
    }
    return quads(p.b_offset, p.b_row, l, p.k - 1u, j, p.n - 1u);
}

fn b_quad_step() -> vec4<u32> {
    return vec4(select(p.b_row, 1u, B_TRANSPOSED));
}

fn b_quad(quad: u32) -> vec4<f32> {
    return unpack4(b[quad_index(quad, ELEM)], quad, ELEM);
}

// The transpose of a block of B: column r is B[l + r, j..].
fn b_block(at: vec4<u32>) -> mat4x4<f32> {
    let block = mat4x4<f32>(b_quad(at.x), b_quad(at.y), b_quad(at.z), b_quad(at.w));
    if B_TRANSPOSED {
        return transpose(block);
    }
    return block;
}

fn b_edge_block(l: u32, j: u32) -> mat4x4<f32> {
    let block = b_block(b_quads(l, j));
    let zero = vec4<f32>();
    return mat4x4<f32>(
        select(zero, block[0], l < p.k),
        select(zero, block[1], l + 1u < p.k),
        select(zero, block[2], l + 2u < p.k),
        select(zero, block[3], l + 3u < p.k),
    );
}
