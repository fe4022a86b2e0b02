// What scales are rounded to before anything is quantized with them.

override STORED: u32 = 1u; // the type that they are stored as

const F32: u32 = 0u;
const BF16: u32 = 2u;

// To the nearest f16 or bf16, ties to even, and never to 0. In whole numbers, since WebGPU leaves it to the
// device in which direction its own conversion rounds and whether it keeps subnormals.
fn round_scale(scale: f32) -> f32 {
    if STORED == F32 {
        return scale;
    }
    if STORED == BF16 {
        let bits = bitcast<u32>(scale);
        return max(bitcast<f32>((bits + 0x7fffu + ((bits >> 16u) & 1u)) & ~0xffffu), 1.17549435e-38);
    }
    if scale < 6.103515625e-5 { // 2^-14: subnormal, a multiple of 2^-24
        return max(round(scale * 16777216.0), 1.0) / 16777216.0;
    }
    let bits = bitcast<u32>(scale);
    return bitcast<f32>((bits + 0xfffu + ((bits >> 13u) & 1u)) & ~0x1fffu);
}
