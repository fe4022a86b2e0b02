// Codes and scales of a packed weight; see src/kernels/qmatmul/packed.rs for how it lies in memory.
//
// A word row holds 32 neighbouring outputs' words, eight vec4. Codes are two's complement. They are
// moved to the top of their word, so come out 2^(32 - BITS) times too large, and scales make up for
// it. They move by multiplication, which compilers know to be a shift: SwiftShader shifts vectors
// one element after another.

override BITS: u32 = 4u; // 2, 3, 4 or 8
override WIDE: bool = false; // scales in f32
override ZEROS: bool = false; // some zero point is not in the middle

const TILE_QUADS = 8u;

fn code(word: vec4<u32>, power: u32) -> vec4<f32> {
    return vec4<f32>(bitcast<vec4<i32>>((word * power) & vec4(~(0xffffffffu >> BITS))));
}

// Four codes of each word, as a matrix with a column for each slot; `moves` are the powers of two
// that bring them to the top.
fn four_codes(word: vec4<u32>, moves: vec4<u32>) -> mat4x4<f32> {
    return mat4x4<f32>(
        code(word, moves.x),
        code(word, moves.y),
        code(word, moves.z),
        code(word, moves.w),
    );
}

// What makes a code at the top of a word count from one.
fn code_unit() -> f32 {
    return 1.0 / f32(1u << (32u - BITS));
}

// The f16 in the low half, which is a normal number or zero.
fn low_halves(word: vec4<u32>) -> vec4<f32> {
    let magnitude = bitcast<vec4<f32>>((word & vec4(0x7fffu)) * 0x2000u) * 0x1p112f;
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(magnitude) | ((word & vec4(0x8000u)) * 0x10000u));
}

// The scales of four outputs for codes as they come, from place `at` of `grid`.
fn four_scales(at: u32) -> vec4<f32> {
    if WIDE {
        return bitcast<vec4<f32>>(grid[at]) * code_unit();
    }
    return low_halves(grid[at]) * code_unit();
}

// Their zero points, less the middle of the range, in the same units.
fn four_zeros(at: u32) -> vec4<f32> {
    if !ZEROS {
        return vec4<f32>();
    }
    if WIDE {
        return bitcast<vec4<f32>>(grid[at + TILE_QUADS]) / code_unit();
    }
    return vec4<f32>(bitcast<vec4<i32>>(grid[at] & vec4(0xffff0000u))) / (code_unit() * 65536.0);
}

// Vec4s of `grid` from one group of a tile to the next.
fn grid_step() -> u32 {
    return select(TILE_QUADS, 2u * TILE_QUADS, WIDE);
}
