//! Codes of 2, 3, 4 and 8 bits in 32-bit words, as the GPTQ formats store them; and as
//! compressed-tensors does ([`Stream`]).
//!
//! A run of codes is a little-endian bit stream: code i occupies bits i·b to i·b + b − 1, counted
//! from the lowest bit of the first word. 2, 4 and 8 bit codes never cross a word; of 3 bit codes
//! 32 fill 3 words exactly. `qweight` runs down the input features (K) for each output feature,
//! `qzeros` along the output features (N) for each group.
//!
//! Codes in memory are one `u8` each, row-major `[N, K]`: a row belongs to one output feature.

use crate::error::{Error, Result};

/// Output features handled together: their words of one row fill a cache line.
const COLUMNS: usize = 16;

/// Input features per step of packing, for the same reason: their codes fill two cache lines.
const CODES_PER_STEP: usize = 128;

/// How many codes fill how many words exactly: the smallest such run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    bits: u32,
    codes: usize,
    words: usize,
}

impl Run {
    fn of(bits: u32) -> Result<Self> {
        let (codes, words) = match bits {
            2 => (16, 1),
            3 => (32, 3),
            4 => (8, 1),
            8 => (4, 1),
            _ => {
                return Err(Error::unsupported(
                    format_args!("codes of {bits} bits cannot be packed"),
                    "The GPTQ format has 2, 3, 4 and 8 bits",
                ));
            }
        };
        Ok(Self { bits, codes, words })
    }

    fn max_code(self) -> u8 {
        // At most 8 bits, so this fits.
        ((1u32 << self.bits) - 1) as u8
    }

    /// Packs one run; `codes` and the words given to `put(index, word)` have the lengths of a run.
    #[inline(always)]
    fn pack(self, codes: &[u8], mut put: impl FnMut(usize, u32)) {
        let mut buffer = 0u64;
        let mut held = 0;
        let mut index = 0;
        for &code in codes {
            buffer |= u64::from(code) << held;
            held += self.bits;
            if held >= 32 {
                put(index, buffer as u32);
                buffer >>= 32;
                held -= 32;
                index += 1;
            }
        }
    }

    /// The inverse of [`Run::pack`].
    #[inline(always)]
    fn unpack(self, mut word: impl FnMut(usize) -> u32, codes: &mut [u8]) {
        let mask = u64::from(self.max_code());
        let mut buffer = 0u64;
        let mut held = 0;
        let mut index = 0;
        for code in codes {
            if held < self.bits {
                buffer |= u64::from(word(index)) << held;
                held += 32;
                index += 1;
            }
            *code = (buffer & mask) as u8;
            buffer >>= self.bits;
            held -= self.bits;
        }
    }

    /// Words that `codes` codes fill, if they fill them exactly.
    fn words_for(self, codes: usize, what: &str) -> Result<usize> {
        if !codes.is_multiple_of(self.codes) {
            return Err(Error::unsupported(
                format_args!("{codes} {what} cannot be packed at {} bits", self.bits),
                format_args!("The GPTQ format needs a multiple of {}", self.codes),
            ));
        }
        Ok(codes / self.codes * self.words)
    }
}

/// Codes that fill whole words: input and output features must be multiples of this at `bits`.
///
/// # Errors
/// [`Error::Unsupported`] for other than 2, 3, 4 and 8 bits.
pub fn codes_per_run(bits: u32) -> Result<u64> {
    Ok(Run::of(bits)?.codes as u64)
}

/// Words in which `codes` codes of `bits` bits are packed.
///
/// # Errors
/// [`Error::Unsupported`] for other than 2, 3, 4 and 8 bits, or codes that leave a word unfilled.
pub fn packed_words(codes: usize, bits: u32) -> Result<usize> {
    Run::of(bits)?.words_for(codes, "features")
}

fn check_length(what: &str, length: usize, rows: usize, columns: usize) -> Result<()> {
    if rows.checked_mul(columns) != Some(length) {
        return Err(Error::Internal(format!("{what} of shape [{rows}, {columns}] have {length} elements")));
    }
    Ok(())
}

fn check_range(what: &str, codes: &[u8], run: Run) -> Result<()> {
    // The bitwise or of all codes passes the largest code exactly if one code does.
    let all = codes.iter().fold(0, |all, code| all | code);
    if all > run.max_code() {
        return Err(Error::Internal(format!("{what} do not fit {} bits", run.bits)));
    }
    Ok(())
}

/// Calls `each(index, chunk)` for all chunks of `size` elements, on all cores where there are any.
fn for_chunks<T: Send>(data: &mut [T], size: usize, each: impl Fn(usize, &mut [T]) + Sync) {
    if size == 0 {
        return;
    }
    #[cfg(not(target_arch = "wasm32"))]
    {
        use rayon::prelude::*;
        data.par_chunks_mut(size).enumerate().for_each(|(index, chunk)| each(index, chunk));
    }
    #[cfg(target_arch = "wasm32")]
    data.chunks_mut(size).enumerate().for_each(|(index, chunk)| each(index, chunk));
}

/// Packs `codes` `[n, k]` into `qweight` `[k·bits/32, n]`.
///
/// # Errors
/// [`Error::Unsupported`] for a width or a `k` that the format cannot hold, [`Error::Internal`]
/// for a wrong number of codes or a code that is too large.
pub fn pack_qweight(codes: &[u8], n: usize, k: usize, bits: u32) -> Result<Vec<u32>> {
    let run = Run::of(bits)?;
    let rows = run.words_for(k, "input features")?;
    check_length("codes", codes.len(), n, k)?;
    check_range("codes", codes, run)?;
    let mut words = vec![0; rows * n];
    // This is a transposition, so it goes tile by tile.
    let runs_per_step = CODES_PER_STEP / run.codes;
    for_chunks(&mut words, runs_per_step * run.words * n, |step, chunk| {
        let begin = step * CODES_PER_STEP;
        let end = k.min(begin + CODES_PER_STEP);
        for first in (0..n).step_by(COLUMNS) {
            for column in first..n.min(first + COLUMNS) {
                let row = &codes[column * k + begin..column * k + end];
                for (index, codes) in row.chunks_exact(run.codes).enumerate() {
                    run.pack(codes, |word, value| chunk[(index * run.words + word) * n + column] = value);
                }
            }
        }
    });
    Ok(words)
}

/// Unpacks `qweight` `[k·bits/32, n]` into codes `[n, k]`.
///
/// # Errors
/// As [`pack_qweight`].
pub fn unpack_qweight(words: &[u32], n: usize, k: usize, bits: u32) -> Result<Vec<u8>> {
    let run = Run::of(bits)?;
    check_length("packed codes", words.len(), run.words_for(k, "input features")?, n)?;
    let mut codes = vec![0; n * k];
    for_chunks(&mut codes, COLUMNS * k, |tile, chunk| {
        for index in 0..k / run.codes {
            for (offset, row) in chunk.chunks_exact_mut(k).enumerate() {
                let column = tile * COLUMNS + offset;
                let codes = &mut row[index * run.codes..(index + 1) * run.codes];
                run.unpack(|word| words[(index * run.words + word) * n + column], codes);
            }
        }
    });
    Ok(codes)
}

/// How `qzeros` holds a zero point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZeroFormat {
    /// `checkpoint_format: "gptq"`: zero − 1 is stored, so that zero 0 cannot be.
    V1,
    /// `checkpoint_format: "gptq_v2"`: the zero point itself is stored.
    V2,
}

/// Packs zero points `[groups, n]` into `qzeros` `[groups, n·bits/32]`.
///
/// # Errors
/// [`Error::Unsupported`] for a width or an `n` that the format cannot hold, [`Error::Internal`]
/// for a wrong number of zero points, one that is too large, or 0 in [`ZeroFormat::V1`]: loaders
/// disagree about what that means, so grids for that format must keep zero points from 1 up.
pub fn pack_qzeros(zeros: &[u8], groups: usize, n: usize, bits: u32, format: ZeroFormat) -> Result<Vec<u32>> {
    let run = Run::of(bits)?;
    run.words_for(n, "output features")?;
    check_length("zero points", zeros.len(), groups, n)?;
    check_range("zero points", zeros, run)?;
    let offset = match format {
        ZeroFormat::V1 => 1,
        ZeroFormat::V2 => 0,
    };
    if let Some(at) = zeros.iter().position(|&zero| zero < offset) {
        return Err(Error::Internal(format!(
            "zero point 0 (group {}, output {}) cannot be stored in checkpoint format gptq",
            at / n,
            at % n
        )));
    }
    let stored: Vec<u8> = zeros.iter().map(|zero| zero - offset).collect();
    let mut words = Vec::with_capacity(zeros.len() / run.codes * run.words);
    for codes in stored.chunks_exact(run.codes) {
        run.pack(codes, |_, word| words.push(word));
    }
    Ok(words)
}

/// Unpacks `qzeros` `[groups, n·bits/32]` into zero points `[groups, n]`.
///
/// A stored zero − 1 is restored modulo 2^bits. Where a zero point was 0, writers of
/// [`ZeroFormat::V1`] disagree: the usual one subtracted 1 from every field of a word at once, with
/// borrows between them, and 2, 4 and 8 bit words are restored by the opposite addition; 3 bit
/// fields, which cross words, each on their own. Without a zero point of 0 both ways are the same.
///
/// # Errors
/// As [`pack_qzeros`], but any word is valid.
pub fn unpack_qzeros(
    words: &[u32],
    groups: usize,
    n: usize,
    bits: u32,
    format: ZeroFormat,
) -> Result<Vec<u8>> {
    let run = Run::of(bits)?;
    let columns = run.words_for(n, "output features")?;
    check_length("packed zero points", words.len(), groups, columns)?;
    let (word_offset, field_offset) = match (format, bits) {
        (ZeroFormat::V2, _) => (0, 0),
        (ZeroFormat::V1, 3) => (0, 1),
        // One in every field.
        (ZeroFormat::V1, _) => (u32::MAX / u32::from(run.max_code()), 0),
    };
    let mut zeros = vec![0; groups * n];
    for (words, zeros) in words.chunks_exact(run.words).zip(zeros.chunks_exact_mut(run.codes)) {
        run.unpack(|index| words[index].wrapping_add(word_offset), zeros);
        for zero in zeros {
            *zero = zero.wrapping_add(field_offset) & run.max_code();
        }
    }
    Ok(zeros)
}

/// How codes lie in the rows of compressed-tensors: each row a bit stream of its own, its last word
/// filled up with zeros.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    run: Run,
    /// Codes that no word boundary divides, so many to a word, or `None` for a dense stream.
    per_word: Option<usize>,
}

impl Stream {
    /// Without a bit left out: code i occupies bits i·b to i·b + b − 1 of its row.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for other than 2, 3, 4 and 8 bits.
    pub fn dense(bits: u32) -> Result<Self> {
        Ok(Self { run: Run::of(bits)?, per_word: None })
    }

    /// Only whole codes in a word, as earlier versions of compressed-tensors wrote 3 bits.
    ///
    /// # Errors
    /// As [`Stream::dense`].
    pub fn whole(bits: u32) -> Result<Self> {
        Ok(Self { run: Run::of(bits)?, per_word: Some(32 / bits as usize) })
    }

    /// Words of a row of `count` codes.
    pub fn words(&self, count: usize) -> usize {
        match self.per_word {
            Some(codes) => count.div_ceil(codes),
            None => (count * self.run.bits as usize).div_ceil(32),
        }
    }

    /// Packs codes `[rows, count]` into `[rows, words(count)]`.
    ///
    /// # Errors
    /// [`Error::Internal`] for a wrong number of codes or a code that is too large.
    pub fn pack(&self, codes: &[u8], rows: usize, count: usize) -> Result<Vec<u32>> {
        check_length("codes", codes.len(), rows, count)?;
        check_range("codes", codes, self.run)?;
        let words = self.words(count);
        let mut packed = vec![0; rows * words];
        let bits = self.run.bits as usize;
        for_chunks(&mut packed, words, |row, packed| {
            for (index, &code) in codes[row * count..(row + 1) * count].iter().enumerate() {
                let (word, bit) = self.place(index);
                packed[word] |= u32::from(code) << bit;
                if bit + bits > 32 {
                    packed[word + 1] |= u32::from(code) >> (32 - bit);
                }
            }
        });
        Ok(packed)
    }

    /// Unpacks `[rows, words(count)]` into codes `[rows, count]`.
    ///
    /// # Errors
    /// [`Error::Internal`] for a wrong number of words.
    pub fn unpack(&self, packed: &[u32], rows: usize, count: usize) -> Result<Vec<u8>> {
        let words = self.words(count);
        check_length("packed codes", packed.len(), rows, words)?;
        let bits = self.run.bits as usize;
        let mask = u32::from(self.run.max_code());
        let mut codes = vec![0; rows * count];
        for_chunks(&mut codes, count, |row, codes| {
            let packed = &packed[row * words..(row + 1) * words];
            for (index, code) in codes.iter_mut().enumerate() {
                let (word, bit) = self.place(index);
                let mut value = packed[word] >> bit;
                if bit + bits > 32 {
                    value |= packed[word + 1] << (32 - bit);
                }
                *code = (value & mask) as u8;
            }
        });
        Ok(codes)
    }

    /// The word and the bit at which a code begins.
    fn place(&self, index: usize) -> (usize, usize) {
        let bits = self.run.bits as usize;
        match self.per_word {
            Some(codes) => (index / codes, index % codes * bits),
            None => (index * bits / 32, index * bits % 32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WIDTHS: [u32; 4] = [2, 3, 4, 8];

    #[test]
    fn symmetric_zero_points_are_the_known_words() {
        let known =
            [(4, 0x7777_7777, 0x8888_8888u32), (8, 0x7f7f_7f7f, 0x8080_8080), (2, 0x5555_5555, 0xaaaa_aaaa)];
        for (bits, v1, v2) in known {
            let n = 2 * Run::of(bits).unwrap().codes;
            let zeros = vec![1 << (bits - 1); n];
            assert_eq!(pack_qzeros(&zeros, 1, n, bits, ZeroFormat::V1).unwrap(), [v1; 2]);
            assert_eq!(pack_qzeros(&zeros, 1, n, bits, ZeroFormat::V2).unwrap(), [v2; 2]);
            assert_eq!(unpack_qzeros(&[v1; 2], 1, n, bits, ZeroFormat::V1).unwrap(), zeros);
            assert_eq!(unpack_qzeros(&[v2; 2], 1, n, bits, ZeroFormat::V2).unwrap(), zeros);
        }
    }

    /// Zero points with 0 among them: v2 holds them, our v1 writer refuses, and the words that the
    /// usual v1 writer makes of them by subtraction are read back right.
    #[test]
    fn a_zero_point_of_zero_is_refused_in_v1_and_read_with_its_borrows() {
        let zeros = [0, 5, 8, 15, 1, 0, 3, 7];
        assert_eq!(pack_qzeros(&zeros, 1, 8, 4, ZeroFormat::V2).unwrap(), [0x7301_f850]);
        assert_eq!(unpack_qzeros(&[0x61f0_e73f], 1, 8, 4, ZeroFormat::V1).unwrap(), zeros);
        let refused = pack_qzeros(&zeros, 1, 8, 4, ZeroFormat::V1).unwrap_err().to_string();
        assert!(refused.contains("group 0, output 0"), "{refused}");
        let mut two_groups = [1; 16];
        two_groups[13] = 0;
        let refused = pack_qzeros(&two_groups, 2, 8, 4, ZeroFormat::V1).unwrap_err().to_string();
        assert!(refused.contains("group 1, output 5"), "{refused}");
    }

    /// The layout of 3 bit codes written out, code by code.
    #[test]
    fn three_bit_codes_cross_words_where_the_format_says() {
        let codes: Vec<u8> = (0..32).map(|index| (index * 5 + 3) % 8).collect();
        let code = |index: usize| u32::from(codes[index]);
        let mut expected = [0u32; 3];
        (0..10).for_each(|j| expected[0] |= code(j) << (3 * j));
        expected[0] |= code(10) << 30;
        expected[1] |= code(10) >> 2;
        (11..21).for_each(|j| expected[1] |= code(j) << (3 * (j - 11) + 1));
        expected[1] |= code(21) << 31;
        expected[2] |= code(21) >> 1;
        (22..32).for_each(|j| expected[2] |= code(j) << (3 * (j - 22) + 2));
        assert_eq!(pack_qweight(&codes, 1, 32, 3).unwrap(), expected);
        assert_eq!(pack_qzeros(&codes, 1, 32, 3, ZeroFormat::V2).unwrap(), expected);
    }

    #[test]
    fn four_bit_codes_run_down_the_input_features() {
        // [n = 2, k = 16]
        let codes: Vec<u8> = (0..16).chain((0..16).rev()).collect();
        let words = pack_qweight(&codes, 2, 16, 4).unwrap();
        assert_eq!(words, [0x7654_3210, 0x89ab_cdef, 0xfedc_ba98, 0x0123_4567]);
    }

    #[test]
    fn shapes_and_widths_are_checked() {
        for bits in [0, 1, 5, 7, 16, 32] {
            assert!(pack_qweight(&[], 0, 0, bits).is_err());
            assert!(codes_per_run(bits).is_err());
        }
        let ragged = pack_qweight(&[0; 33], 1, 33, 3).unwrap_err().to_string();
        assert!(ragged.contains("33 input features") && ragged.contains("multiple of 32"), "{ragged}");
        let ragged = pack_qzeros(&[1; 7], 1, 7, 4, ZeroFormat::V2).unwrap_err().to_string();
        assert!(ragged.contains("7 output features"), "{ragged}");
        assert!(pack_qweight(&[0; 15], 2, 8, 4).is_err());
        assert!(pack_qweight(&[0; 16], usize::MAX, 8, 4).is_err());
        assert!(unpack_qweight(&[0; 3], 2, 8, 4).is_err());
        assert!(unpack_qzeros(&[0; 3], 2, 8, 4, ZeroFormat::V2).is_err());
        let large = pack_qweight(&[16, 0, 0, 0, 0, 0, 0, 0], 1, 8, 4).unwrap_err().to_string();
        assert!(large.contains("do not fit 4 bits"), "{large}");
        assert_eq!(packed_words(64, 3).unwrap(), 6);
        for bits in WIDTHS {
            assert!(pack_qweight(&[], 0, 32, bits).unwrap().is_empty());
            assert!(unpack_qweight(&[], 0, 32, bits).unwrap().is_empty());
            assert!(unpack_qweight(&[], 3, 0, bits).unwrap().is_empty());
        }
    }

    /// Bit `position` of the stream of column `column` of `qweight`.
    fn stream_bit(words: &[u32], n: usize, column: usize, position: usize) -> u32 {
        (words[position / 32 * n + column] >> (position % 32)) & 1
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn weights_come_back_and_each_bit_is_in_its_place(
            bits in proptest::sample::select(WIDTHS.to_vec()),
            n in 1usize..40,
            runs in 1usize..20,
            seed in any::<u64>(),
        ) {
            let k = runs * Run::of(bits).unwrap().codes;
            let codes = random_codes(n * k, bits, seed);
            let words = pack_qweight(&codes, n, k, bits).unwrap();
            prop_assert_eq!(words.len(), k * bits as usize / 32 * n);
            for column in 0..n {
                for row in 0..k {
                    for bit in 0..bits as usize {
                        prop_assert_eq!(
                            stream_bit(&words, n, column, row * bits as usize + bit),
                            u32::from(codes[column * k + row] >> bit) & 1
                        );
                    }
                }
            }
            prop_assert_eq!(unpack_qweight(&words, n, k, bits).unwrap(), codes);
        }

        #[test]
        fn zero_points_come_back(
            bits in proptest::sample::select(WIDTHS.to_vec()),
            groups in 1usize..5,
            runs in 1usize..5,
            seed in any::<u64>(),
        ) {
            let n = runs * Run::of(bits).unwrap().codes;
            let mut zeros = random_codes(groups * n, bits, seed);
            let v2 = pack_qzeros(&zeros, groups, n, bits, ZeroFormat::V2).unwrap();
            prop_assert_eq!(&unpack_qzeros(&v2, groups, n, bits, ZeroFormat::V2).unwrap(), &zeros);
            zeros.iter_mut().for_each(|zero| *zero = (*zero).max(1));
            let v1 = pack_qzeros(&zeros, groups, n, bits, ZeroFormat::V1).unwrap();
            prop_assert_eq!(&unpack_qzeros(&v1, groups, n, bits, ZeroFormat::V1).unwrap(), &zeros);
        }
    }

    /// The example of the format's own description, and a 3-bit row that crosses words.
    #[test]
    fn rows_are_streams_of_their_own() {
        let stream = Stream::dense(4).unwrap();
        let codes = [0, 1, 8, 9, 10, 11, 12, 15];
        assert_eq!(stream.pack(&codes, 1, 8).unwrap(), [0xfcba_9810]);
        let dense = Stream::dense(3).unwrap();
        assert_eq!((dense.words(10), dense.words(11), dense.words(32)), (1, 2, 3));
        let whole = Stream::whole(3).unwrap();
        assert_eq!((whole.words(10), whole.words(11), whole.words(32)), (1, 2, 4));
        let codes = [7; 11];
        assert_eq!(dense.pack(&codes, 1, 11).unwrap(), [u32::MAX, 1]);
        assert_eq!(whole.pack(&codes, 1, 11).unwrap(), [0x3fff_ffff, 7]);
        for bits in WIDTHS {
            for stream in [Stream::dense(bits).unwrap(), Stream::whole(bits).unwrap()] {
                for count in [0, 1, 31, 32, 33, 100] {
                    let codes = random_codes(5 * count, bits, 9);
                    let packed = stream.pack(&codes, 5, count).unwrap();
                    assert_eq!(stream.unpack(&packed, 5, count).unwrap(), codes);
                }
            }
        }
        assert!(Stream::dense(4).unwrap().pack(&[16], 1, 1).is_err());
        assert!(Stream::dense(5).is_err());
    }

    fn random_codes(count: usize, bits: u32, seed: u64) -> Vec<u8> {
        let mut state = seed | 1;
        let mut next = || {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as u8 & ((1u32 << bits) - 1) as u8
        };
        (0..count).map(|_| next()).collect()
    }
}
