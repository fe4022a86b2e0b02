//! A device under WebGPU's default limits, with kernels of a few lines.

use std::rc::Rc;

use half::{bf16, f16};

use super::*;
use crate::error::Error;
use crate::face;
use crate::kernels::testing::test_gpu;
use crate::tensor::{Elem, Tensor};

/// out[i] = in[i] * factor + addend
const AFFINE: Kernel = Kernel {
    name: "test_affine",
    source: "
        struct Params { factor: u32, addend: u32 }
        @group(0) @binding(0) var<uniform> p: Params;
        @group(0) @binding(1) var<storage, read> from_: array<u32>;
        @group(0) @binding(2) var<storage, read_write> to: array<u32>;
        override EXTRA: u32 = 0u;
        @compute @workgroup_size(64)
        fn main(@builtin(global_invocation_id) id: vec3<u32>) {
            if id.x < arrayLength(&to) {
                to[id.x] = from_[id.x] * p.factor + p.addend + EXTRA;
            }
        }",
    bindings: &[Access::Read, Access::ReadWrite],
};

fn affine(gpu: &Gpu, from: &Tensor, to: &mut Tensor, factor: u32, addend: u32) {
    let groups = gpu.unfold(from.len().div_ceil(64));
    let params = [factor, addend];
    gpu.dispatch(
        &AFFINE,
        &[],
        &[from.gpu().unwrap(), to.gpu().unwrap()],
        bytemuck::cast_slice(&params),
        groups,
        1.0,
    )
    .unwrap();
}

fn with_gpu(test: impl FnOnce(&Device, &Rc<Gpu>)) {
    let Some(device) = test_gpu() else { return };
    let Device::Gpu(gpu) = &device else { return };
    test(&device, gpu);
}

fn read(tensor: &Tensor) -> Vec<u32> {
    pollster::block_on(tensor.to_u32()).unwrap()
}

#[test]
fn what_goes_up_comes_back() {
    with_gpu(|device, _| {
        for count in [1usize, 2, 3, 5, 63, 64, 1000, 4097] {
            let bytes: Vec<u8> = (0..4 * count).map(|i| (i * 7 + 3) as u8).collect();
            for elem in [Elem::F32, Elem::F16, Elem::BF16, Elem::U32, Elem::U8] {
                let bytes = &bytes[..count * elem.bytes()];
                let tensor = Tensor::from_bytes(device, elem, &[count], bytes).unwrap();
                assert_eq!(pollster::block_on(tensor.to_bytes()).unwrap(), bytes, "{count} {elem:?}");
            }
        }
        let zeros = Tensor::zeros(device, Elem::U8, &[3, 5]).unwrap();
        assert_eq!(pollster::block_on(zeros.to_bytes()).unwrap(), [0; 15]);
    });
}

#[test]
fn a_transfer_of_several_pieces_is_whole() {
    with_gpu(|device, _| {
        let values: Vec<u32> = (0..17 << 20).map(|i: u32| i.wrapping_mul(2_654_435_761)).collect();
        let tensor = Tensor::from_u32(device, &[values.len()], values.clone()).unwrap();
        assert!(read(&tensor) == values);
    });
}

#[test]
fn sixteen_bit_floats_widen_on_the_way_back() {
    with_gpu(|device, _| {
        let values = [1.5f32, -2.0, 0.25];
        let half: Vec<u8> = values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
        let brain: Vec<u8> = values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
        for (elem, bytes) in [(Elem::F16, half), (Elem::BF16, brain)] {
            let tensor = Tensor::from_bytes(device, elem, &[3], &bytes).unwrap();
            assert_eq!(pollster::block_on(tensor.to_f32()).unwrap(), values);
        }
    });
}

#[test]
fn a_buffer_reused_within_a_batch_keeps_its_order() {
    with_gpu(|device, gpu| {
        let first = Tensor::from_u32(device, &[100], vec![1; 100]).unwrap();
        let mut doubled = Tensor::uninit(device, Elem::U32, &[100]).unwrap();
        affine(gpu, &first, &mut doubled, 2, 0);
        drop(first);
        // Takes the buffer of `first` while the dispatch that reads it is only recorded.
        let second = Tensor::from_u32(device, &[100], vec![10; 100]).unwrap();
        let mut tripled = Tensor::uninit(device, Elem::U32, &[100]).unwrap();
        affine(gpu, &second, &mut tripled, 3, 0);
        assert_eq!(read(&doubled), [2; 100]);
        assert_eq!(read(&tripled), [30; 100]);
    });
}

#[test]
fn the_memory_account_returns_to_where_it_was() {
    with_gpu(|device, gpu| {
        let (before, _) = gpu.memory();
        let tensor = Tensor::zeros(device, Elem::F32, &[1000, 1000]).unwrap();
        let (during, peak) = gpu.memory();
        assert!(during - before >= 4_000_000 && during - before < 4_600_000 && peak >= during);
        drop(tensor);
        assert_eq!(gpu.memory().0, before);
    });
}

#[test]
fn more_dispatches_than_one_batch_holds_keep_their_parameters() {
    with_gpu(|device, gpu| {
        let mut a = Tensor::zeros(device, Elem::U32, &[70]).unwrap();
        let mut b = Tensor::uninit(device, Elem::U32, &[70]).unwrap();
        let mut want = 0u32;
        for step in 0..200 {
            affine(gpu, &a, &mut b, 3, step);
            std::mem::swap(&mut a, &mut b);
            want = want.wrapping_mul(3).wrapping_add(step);
        }
        assert_eq!(read(&a), [want; 70]);
    });
}

#[test]
fn overrides_make_their_own_pipelines() {
    with_gpu(|device, gpu| {
        let from = Tensor::from_u32(device, &[4], vec![5; 4]).unwrap();
        let to = Tensor::uninit(device, Elem::U32, &[4]).unwrap();
        for extra in [7.0, 9.0, 7.0] {
            let params = [1u32, 0];
            let buffers = [from.gpu().unwrap(), to.gpu().unwrap()];
            let params = bytemuck::cast_slice(&params);
            gpu.dispatch(&AFFINE, &[("EXTRA", extra)], &buffers, params, [1, 1, 1], 1.0).unwrap();
            assert_eq!(read(&to), [5 + extra as u32; 4]);
        }
    });
}

#[test]
fn a_tensor_too_large_to_bind_is_an_error() {
    with_gpu(|device, _| {
        let count = device.max_tensor_bytes() as usize / 4 + 1;
        let error = Tensor::uninit(device, Elem::F32, &[count]).err().unwrap();
        assert!(matches!(error, Error::Device { .. }), "{error}");
        assert!(error.to_string().contains(&device.max_tensor_bytes().to_string()), "{error}");
    });
}

#[test]
fn a_call_that_does_not_fit_its_kernel_is_refused() {
    with_gpu(|device, gpu| {
        let tensor = Tensor::zeros(device, Elem::U32, &[4]).unwrap();
        let buffer = tensor.gpu().unwrap();
        assert!(gpu.dispatch(&AFFINE, &[], &[buffer], &[0; 8], [1, 1, 1], 1.0).is_err());
        assert!(gpu.dispatch(&AFFINE, &[], &[buffer, buffer], &[0; 260], [1, 1, 1], 1.0).is_err());
        assert!(gpu.dispatch(&AFFINE, &[], &[buffer, buffer], &[0; 8], [70_000, 1, 1], 1.0).is_err());
        assert_eq!(gpu.unfold(70_000), [35_000, 2, 1]);
        assert_eq!(gpu.unfold(1), [1, 1, 1]);
    });
}

#[test]
fn an_invalid_shader_is_an_error_at_the_next_wait() {
    const BROKEN: Kernel = Kernel {
        name: "test_broken",
        source: "
            @group(0) @binding(1) var<storage, read_write> to: array<u32>;
            @compute @workgroup_size(64)
            fn main() { to[0] = no_such_name; }",
        bindings: &[Access::ReadWrite],
    };
    with_gpu(|device, gpu| {
        let tensor = Tensor::zeros(device, Elem::U32, &[4]).unwrap();
        gpu.dispatch(&BROKEN, &[], &[tensor.gpu().unwrap()], &[0; 8], [1, 1, 1], 1.0).unwrap();
        let error = pollster::block_on(gpu.settle()).unwrap_err();
        assert!(matches!(error, Error::Device { .. }));
        let error = error.to_string();
        assert!(error.starts_with("compiling the shader test_broken for "), "{error}");
        assert!(error.contains("no_such_name") && error.contains(&face::USE_CPU.to_string()), "{error}");
        assert!(!error.contains('\n') && !error.contains(&face::MAX_MEMORY.to_string()), "{error}");
        // What was wrong is reported once; the device goes on.
        assert_eq!(read(&tensor), [0; 4]);
        gpu.dispatch(&BROKEN, &[], &[tensor.gpu().unwrap()], &[0; 8], [1, 1, 1], 1.0).unwrap();
        assert_eq!(pollster::block_on(tensor.to_u32()).unwrap_err().to_string(), error);
    });
}

#[test]
fn writing_what_is_also_read_is_an_error_and_not_a_panic() {
    with_gpu(|device, gpu| {
        let tensor = Tensor::zeros(device, Elem::U32, &[4]).unwrap();
        let buffer = tensor.gpu().unwrap();
        gpu.dispatch(&AFFINE, &[], &[buffer, buffer], &[0; 8], [1, 1, 1], 1.0).unwrap();
        assert!(matches!(pollster::block_on(gpu.settle()), Err(Error::Device { .. })));
    });
}

#[test]
fn a_missing_adapter_names_those_there_are() {
    let choice = AdapterChoice { name: Some("no such adapter".into()), allow_software: true };
    let error = pollster::block_on(pick_adapter(&choice)).err().unwrap().to_string();
    assert!(error.contains("no such adapter") && error.contains("found: "), "{error}");
}
