// The parameters that all forms of gemm share: strides and offsets are in elements.
struct GemmParams {
    m: u32,
    n: u32,
    k: u32,
    // Output tiles along a row of C.
    tiles_x: u32,
    a_offset: u32,
    a_row: u32,
    a_col: u32,
    b_offset: u32,
    b_row: u32,
    b_col: u32,
    c_offset: u32,
    c_row: u32,
    alpha: f32,
    beta: f32,
    has_bias: u32,
    // 1: outputs with row0 + row < col0 + column need not be written.
    lower: u32,
    // Where this part of C lies in the whole product.
    row0: u32,
    col0: u32,
    // Of packed weights: slots of a group, groups, rows of words.
    group: u32,
    groups: u32,
    word_rows: u32,
}
