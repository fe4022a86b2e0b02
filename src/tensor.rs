//! An array that lives on a device.
//!
//! Tensors are dense and row-major. They are owned, never shared: an operation borrows its inputs
//! and returns its output, or writes into a `&mut Tensor`. On a GPU 16-bit floats lie two in a word
//! and bytes four in a word; every buffer is a whole number of 16-byte rows, so kernels may load
//! vectors of four words.

use half::{bf16, f16};

use crate::device::{Device, GpuBuffer, host};
use crate::error::{Error, Result};

/// What a tensor's elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Elem {
    F32,
    F16,
    BF16,
    U32,
    /// Codes of quantized weights, one in a byte.
    U8,
}

impl Elem {
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::U8 => 1,
        }
    }

    /// The value of the override `ELEM` in shaders (see `shaders/shared/unpack.wgsl`).
    pub fn shader_constant(self) -> f64 {
        match self {
            Self::F32 | Self::U32 | Self::U8 => 0.0,
            Self::F16 => 1.0,
            Self::BF16 => 2.0,
        }
    }
}

/// The elements of a tensor in host memory.
pub enum Host {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    U32(Vec<u32>),
    U8(Vec<u8>),
}

enum Storage {
    Host(Host),
    Gpu(GpuBuffer),
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Self::Host(Host::F32(values)) = self {
            host::give(std::mem::take(values));
        }
    }
}

/// A dense row-major array.
pub struct Tensor {
    device: Device,
    elem: Elem,
    shape: Vec<usize>,
    storage: Storage,
}

impl Tensor {
    /// All zeros.
    pub fn zeros(device: &Device, elem: Elem, shape: &[usize]) -> Result<Self> {
        let mut tensor = Self::uninit(device, elem, shape)?;
        match &mut tensor.storage {
            Storage::Gpu(buffer) => buffer.gpu().clear(buffer),
            Storage::Host(Host::F32(values)) => values.fill(0.0),
            Storage::Host(_) => {}
        }
        Ok(tensor)
    }

    /// Content unspecified, for outputs that a kernel writes whole.
    pub fn uninit(device: &Device, elem: Elem, shape: &[usize]) -> Result<Self> {
        let count = shape.iter().product::<usize>();
        let storage = match device {
            Device::Cpu => Storage::Host(match elem {
                Elem::F32 => Host::F32(host::take(count)),
                Elem::F16 => Host::F16(vec![f16::ZERO; count]),
                Elem::BF16 => Host::BF16(vec![bf16::ZERO; count]),
                Elem::U32 => Host::U32(vec![0; count]),
                Elem::U8 => Host::U8(vec![0; count]),
            }),
            Device::Gpu(gpu) => Storage::Gpu(gpu.alloc((count * elem.bytes()) as u64)?),
        };
        Ok(Self { device: device.clone(), elem, shape: shape.to_vec(), storage })
    }

    pub fn from_f32(device: &Device, shape: &[usize], values: Vec<f32>) -> Result<Self> {
        match device {
            Device::Cpu => Self::host(shape, Host::F32(values)),
            Device::Gpu(_) => Self::from_bytes(device, Elem::F32, shape, bytemuck::cast_slice(&values)),
        }
    }

    pub fn from_u32(device: &Device, shape: &[usize], values: Vec<u32>) -> Result<Self> {
        match device {
            Device::Cpu => Self::host(shape, Host::U32(values)),
            Device::Gpu(_) => Self::from_bytes(device, Elem::U32, shape, bytemuck::cast_slice(&values)),
        }
    }

    /// Little-endian bytes as they stand in a checkpoint.
    ///
    /// # Errors
    /// [`Error::Internal`] when their number is not shape × element size.
    pub fn from_bytes(device: &Device, elem: Elem, shape: &[usize], bytes: &[u8]) -> Result<Self> {
        let count = shape.iter().product::<usize>();
        if bytes.len() != count * elem.bytes() {
            return Err(Error::Internal(format!("{} bytes for a {elem:?} tensor {shape:?}", bytes.len())));
        }
        match device {
            // The bytes need not be aligned, so they are copied by value.
            Device::Cpu => Self::host(
                shape,
                match elem {
                    Elem::F32 => Host::F32(host::of_bytes(bytes)),
                    Elem::F16 => Host::F16(host::of_bytes(bytes)),
                    Elem::BF16 => Host::BF16(host::of_bytes(bytes)),
                    Elem::U32 => Host::U32(host::of_bytes(bytes)),
                    Elem::U8 => Host::U8(bytes.to_vec()),
                },
            ),
            Device::Gpu(gpu) => {
                let buffer = gpu.alloc(bytes.len() as u64)?;
                let whole = bytes.len() / 4 * 4;
                gpu.upload(&buffer, 0, &bytes[..whole]);
                if whole < bytes.len() {
                    let mut last = [0; 4];
                    last[..bytes.len() - whole].copy_from_slice(&bytes[whole..]);
                    gpu.upload(&buffer, whole as u64, &last);
                }
                Ok(Self {
                    device: device.clone(),
                    elem,
                    shape: shape.to_vec(),
                    storage: Storage::Gpu(buffer),
                })
            }
        }
    }

    fn host(shape: &[usize], data: Host) -> Result<Self> {
        let (elem, len) = match &data {
            Host::F32(v) => (Elem::F32, v.len()),
            Host::F16(v) => (Elem::F16, v.len()),
            Host::BF16(v) => (Elem::BF16, v.len()),
            Host::U32(v) => (Elem::U32, v.len()),
            Host::U8(v) => (Elem::U8, v.len()),
        };
        if len != shape.iter().product::<usize>() {
            return Err(Error::Internal(format!("{len} elements for a tensor {shape:?}")));
        }
        Ok(Self { device: Device::Cpu, elem, shape: shape.to_vec(), storage: Storage::Host(data) })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn elem(&self) -> Elem {
        self.elem
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size in bytes of its elements.
    pub fn bytes(&self) -> usize {
        self.len() * self.elem.bytes()
    }

    /// Product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len().saturating_sub(1)].iter().product()
    }

    /// The last dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// This tensor and then `next`, one after the other along the first dimension.
    ///
    /// # Errors
    /// [`Error::Internal`] when they differ in more than their first dimension, or a GPU would have to
    /// cut a word; [`Error::Device`] when the whole is larger than a tensor may be.
    pub fn joined(&self, next: &Self) -> Result<Self> {
        let same = self.elem == next.elem
            && self.device.same(&next.device)
            && !self.shape.is_empty()
            && self.shape.get(1..) == next.shape.get(1..);
        let whole_words = self.bytes().is_multiple_of(4) && next.bytes().is_multiple_of(4);
        if !same || (!whole_words && !self.device.is_cpu()) {
            return Err(Error::Internal(format!("{:?} and {:?} cannot be joined", self.shape, next.shape)));
        }
        let mut shape = self.shape.clone();
        shape[0] += next.shape[0];
        fn both<T: Clone>(a: &[T], b: &[T]) -> Vec<T> {
            let mut both = host::in_large_pages(a.len() + b.len());
            both.extend_from_slice(a);
            both.extend_from_slice(b);
            both
        }
        let data = match (&self.storage, &next.storage) {
            (Storage::Gpu(a), Storage::Gpu(b)) => {
                let joined = Self::uninit(&self.device, self.elem, &shape)?;
                let (to, gpu) = (joined.gpu()?, a.gpu());
                gpu.copy(a, 0, to, 0, self.bytes() as u64);
                gpu.copy(b, 0, to, self.bytes() as u64, next.bytes() as u64);
                return Ok(joined);
            }
            (Storage::Host(Host::F32(a)), Storage::Host(Host::F32(b))) => Host::F32(both(a, b)),
            (Storage::Host(Host::F16(a)), Storage::Host(Host::F16(b))) => Host::F16(both(a, b)),
            (Storage::Host(Host::BF16(a)), Storage::Host(Host::BF16(b))) => Host::BF16(both(a, b)),
            (Storage::Host(Host::U32(a)), Storage::Host(Host::U32(b))) => Host::U32(both(a, b)),
            (Storage::Host(Host::U8(a)), Storage::Host(Host::U8(b))) => Host::U8(both(a, b)),
            _ => return Err(Error::Internal("tensors of different kinds cannot be joined".into())),
        };
        Self::host(&shape, data)
    }

    /// The same elements under another shape.
    ///
    /// # Errors
    /// [`Error::Internal`] when the number of elements differs.
    pub fn reshaped(mut self, shape: &[usize]) -> Result<Self> {
        if shape.iter().product::<usize>() != self.len() {
            return Err(Error::Internal(format!("{:?} cannot be seen as {shape:?}", self.shape)));
        }
        self.shape = shape.to_vec();
        Ok(self)
    }

    /// The GPU buffer; an internal error for a tensor of the CPU.
    pub fn gpu(&self) -> Result<&GpuBuffer> {
        match &self.storage {
            Storage::Gpu(buffer) => Ok(buffer),
            Storage::Host(_) => Err(Error::Internal("a CPU tensor reached a GPU kernel".into())),
        }
    }

    /// The host data; an internal error for a tensor of a GPU.
    pub fn host_data(&self) -> Result<&Host> {
        match &self.storage {
            Storage::Host(data) => Ok(data),
            Storage::Gpu(_) => Err(Error::Internal("a GPU tensor reached a CPU kernel".into())),
        }
    }

    /// The host data, to be changed; an internal error for a tensor of a GPU.
    pub fn host_data_mut(&mut self) -> Result<&mut Host> {
        match &mut self.storage {
            Storage::Host(data) => Ok(data),
            Storage::Gpu(_) => Err(Error::Internal("a GPU tensor reached a CPU kernel".into())),
        }
    }

    pub fn f32s(&self) -> Result<&[f32]> {
        match self.host_data()? {
            Host::F32(values) => Ok(values),
            _ => Err(self.wrong_elem(Elem::F32)),
        }
    }

    pub fn f32s_mut(&mut self) -> Result<&mut [f32]> {
        let wrong = self.wrong_elem(Elem::F32);
        match &mut self.storage {
            Storage::Host(Host::F32(values)) => Ok(values),
            _ => Err(wrong),
        }
    }

    pub fn u32s(&self) -> Result<&[u32]> {
        match self.host_data()? {
            Host::U32(values) => Ok(values),
            _ => Err(self.wrong_elem(Elem::U32)),
        }
    }

    pub fn u32s_mut(&mut self) -> Result<&mut [u32]> {
        let wrong = self.wrong_elem(Elem::U32);
        match &mut self.storage {
            Storage::Host(Host::U32(values)) => Ok(values),
            _ => Err(wrong),
        }
    }

    pub fn u8s(&self) -> Result<&[u8]> {
        match self.host_data()? {
            Host::U8(values) => Ok(values),
            _ => Err(self.wrong_elem(Elem::U8)),
        }
    }

    pub fn u8s_mut(&mut self) -> Result<&mut [u8]> {
        let wrong = self.wrong_elem(Elem::U8);
        match &mut self.storage {
            Storage::Host(Host::U8(values)) => Ok(values),
            _ => Err(wrong),
        }
    }

    fn wrong_elem(&self, wanted: Elem) -> Error {
        Error::Internal(format!("a host {wanted:?} tensor was wanted, got {:?} {:?}", self.elem, self.shape))
    }

    /// Brings the elements to the host, widened to f32.
    ///
    /// # Errors
    /// [`Error::Device`] when the device fails.
    pub async fn to_f32(&self) -> Result<Vec<f32>> {
        let bytes;
        let host;
        let data = match &self.storage {
            Storage::Host(data) => data,
            Storage::Gpu(_) => {
                bytes = self.to_bytes().await?;
                host = match self.elem {
                    Elem::F32 => Host::F32(bytemuck::pod_collect_to_vec(&bytes)),
                    Elem::F16 => Host::F16(bytemuck::pod_collect_to_vec(&bytes)),
                    Elem::BF16 => Host::BF16(bytemuck::pod_collect_to_vec(&bytes)),
                    Elem::U32 | Elem::U8 => return Err(self.wrong_elem(Elem::F32)),
                };
                &host
            }
        };
        match data {
            Host::F32(v) => Ok(v.clone()),
            Host::F16(v) => Ok(v.iter().map(|x| x.to_f32()).collect()),
            Host::BF16(v) => Ok(v.iter().map(|x| x.to_f32()).collect()),
            Host::U32(_) | Host::U8(_) => Err(self.wrong_elem(Elem::F32)),
        }
    }

    /// Brings the elements to the host as little-endian bytes.
    pub async fn to_bytes(&self) -> Result<Vec<u8>> {
        match &self.storage {
            Storage::Gpu(buffer) => {
                let mut bytes = buffer.gpu().read(buffer, 0, self.bytes().next_multiple_of(4) as u64).await?;
                bytes.truncate(self.bytes());
                Ok(bytes)
            }
            Storage::Host(data) => Ok(match data {
                Host::F32(v) => bytemuck::cast_slice(v).to_vec(),
                Host::F16(v) => bytemuck::cast_slice(v).to_vec(),
                Host::BF16(v) => bytemuck::cast_slice(v).to_vec(),
                Host::U32(v) => bytemuck::cast_slice(v).to_vec(),
                Host::U8(v) => v.clone(),
            }),
        }
    }

    pub async fn to_u32(&self) -> Result<Vec<u32>> {
        match &self.storage {
            Storage::Host(Host::U32(values)) => Ok(values.clone()),
            _ if self.elem == Elem::U32 => Ok(bytemuck::pod_collect_to_vec(&self.to_bytes().await?)),
            _ => Err(self.wrong_elem(Elem::U32)),
        }
    }
}
