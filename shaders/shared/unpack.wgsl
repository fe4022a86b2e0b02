// Weights travel as stored: f32, or two 16-bit floats in a word, the first in the low half.
// ELEM says which; it is an override, so the other branches vanish when the pipeline is made.
const ELEM_F32: u32 = 0u;
const ELEM_F16: u32 = 1u;
const ELEM_BF16: u32 = 2u;

// A multiplication, which compilers know to be a shift: SwiftShader takes long to shift.
fn unpack2_bf16(word: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(word * 0x10000u), bitcast<f32>(word & 0xffff0000u));
}

fn unpack2(word: u32, elem: u32) -> vec2<f32> {
    if elem == ELEM_BF16 {
        return unpack2_bf16(word);
    }
    return unpack2x16float(word);
}

// Four consecutive elements: `quad` counts fours; `words` is the vec4 of words that holds them,
// words[quad] for f32 and words[quad / 2] for 16-bit types.
fn unpack4(words: vec4<u32>, quad: u32, elem: u32) -> vec4<f32> {
    if elem == ELEM_F32 {
        return bitcast<vec4<f32>>(words);
    }
    let half = select(words.xy, words.zw, (quad & 1u) == 1u);
    return vec4<f32>(unpack2(half.x, elem), unpack2(half.y, elem));
}

// Where in an array<vec4<u32>> the quad lies.
fn quad_index(quad: u32, elem: u32) -> u32 {
    return select(quad >> 1u, quad, elem == ELEM_F32);
}
