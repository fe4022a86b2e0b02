//! Our side of `bench.mjs`: chains of products by packed weights, made and multiplied as a model's layers are.

#[cfg(not(target_arch = "wasm32"))]
fn main() {
    eprintln!("this runs in a browser: make bench-web");
}

#[cfg(target_arch = "wasm32")]
fn main() {}

#[cfg(target_arch = "wasm32")]
mod side {
    use halftone::checkpoint::GptqLinear;
    use halftone::checkpoint::linear::natural_g_idx;
    use halftone::device::{AdapterChoice, Device, GpuOptions};
    use halftone::error::Result;
    use halftone::kernels::input::Input;
    use halftone::kernels::selftest::open_gpu;
    use halftone::model::Linear;
    use halftone::tensor::{Elem, Tensor};
    use wasm_bindgen::prelude::*;

    /// A device and the layers that a chain takes in turn.
    #[wasm_bindgen]
    pub struct Chain {
        device: Device,
        layers: Vec<Linear>,
    }

    fn told<T>(result: Result<T>) -> std::result::Result<T, JsError> {
        result.map_err(|error| JsError::new(&error.to_string()))
    }

    #[wasm_bindgen]
    impl Chain {
        pub async fn open() -> std::result::Result<Chain, JsError> {
            let choice = AdapterChoice { name: None, allow_software: true };
            Ok(Chain { device: told(open_gpu(&choice, &GpuOptions::default()).await)?, layers: Vec::new() })
        }

        pub fn clear(&mut self) {
            self.layers.clear();
        }

        /// A layer of 4-bit codes [n, k] with scales [groups, n] and zero points in the middle.
        pub fn add(
            &mut self,
            n: usize,
            k: usize,
            group: usize,
            codes: Vec<u8>,
            scales: Vec<f32>,
        ) -> std::result::Result<(), JsError> {
            let layer = GptqLinear {
                n,
                k,
                bits: 4,
                codes,
                zeros: vec![8; scales.len()],
                scales,
                g_idx: told(natural_g_idx(k, group as i64))?,
                bias: None,
            };
            self.layers.push(told(Linear::packed(&layer, &self.device))?);
            Ok(())
        }

        /// `nodes` products one after another, the layers in turn, of x [rows, k]; the last one's result.
        pub async fn run(
            &self,
            x: Vec<f32>,
            rows: usize,
            nodes: usize,
        ) -> std::result::Result<Vec<f32>, JsError> {
            let k = x.len() / rows.max(1);
            let mut x = told(Tensor::from_f32(&self.device, &[rows, k], x))?;
            for node in 0..nodes {
                let layer = &self.layers[node % self.layers.len()];
                let mut y = told(Tensor::uninit(&self.device, Elem::F32, &[rows, layer.out_features()]))?;
                told(layer.project(&mut y, Input::Plain(&x), false))?;
                x = y;
            }
            told(x.to_f32().await)
        }
    }
}
