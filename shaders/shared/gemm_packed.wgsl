// Loads of 4x4 blocks of B [k, n] from a packed weight, as gemm_b has those of a dense one.

struct Grid {
    scales: vec4<f32>,
    zeros: vec4<f32>,
}

// Where a tile's words and grid begin for four outputs, counted in fours from the weight's first.
fn words_of(four: u32) -> u32 {
    return four / TILE_QUADS * p.word_rows * TILE_QUADS + four % TILE_QUADS;
}

fn grid_of(four: u32, group: u32) -> Grid {
    let at = (four / TILE_QUADS * p.groups + group) * grid_step() + four % TILE_QUADS;
    return Grid(four_scales(at), four_zeros(at));
}

fn centred(codes: mat4x4<f32>, zeros: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(codes[0] - zeros, codes[1] - zeros, codes[2] - zeros, codes[3] - zeros);
}

// Slots l.. of 3 bits, whose twelve bits may lie in a word and the one after it. Column r: slot l + r
// of four outputs, whose words begin at `start`; l is a multiple of four.
fn crossing_codes(start: u32, l: u32) -> mat4x4<f32> {
    let bit = 3u * (l % 32u);
    let row = l / 32u * 3u + bit / 32u;
    let shift = bit % 32u;
    var word = words[start + row * TILE_QUADS] >> vec4(shift);
    if shift > 20u {
        word |= words[start + (row + 1u) * TILE_QUADS] << vec4(32u - shift);
    }
    return four_codes(word, vec4(0x20000000u, 0x4000000u, 0x800000u, 0x100000u));
}

// The same of any width, as weights.
fn packed_block(start: u32, l: u32, grid: Grid) -> mat4x4<f32> {
    var codes: mat4x4<f32>;
    if BITS == 2u {
        let moves = vec4(0x40000000u, 0x10000000u, 0x4000000u, 0x1000000u) >> vec4(2u * (l % 16u));
        codes = four_codes(words[start + l / 16u * TILE_QUADS], moves);
    } else if BITS == 3u {
        codes = crossing_codes(start, l);
    } else if BITS == 4u {
        let low = vec4(0x10000000u, 0x1000000u, 0x100000u, 0x10000u);
        let high = vec4(0x1000u, 0x100u, 0x10u, 0x1u);
        let moves = select(low, high, vec4((l & 4u) != 0u));
        codes = four_codes(words[start + l / 8u * TILE_QUADS], moves);
    } else {
        codes = four_codes(words[start + l / 4u * TILE_QUADS], vec4(0x1000000u, 0x10000u, 0x100u, 0x1u));
    }
    codes = centred(codes, grid.zeros);
    return mat4x4<f32>(
        codes[0] * grid.scales,
        codes[1] * grid.scales,
        codes[2] * grid.scales,
        codes[3] * grid.scales,
    );
}
