// y = f(y), or with GATED y = f(y) * x, element by element, four a thread.
//
// Dispatch: one workgroup per 64 quads, unfolded over x and y. CPU twin: src/kernels/activation.rs.
override FUNCTION: u32 = 0u;
override GATED: bool = false;

const SILU: u32 = 0u;
const GELU: u32 = 1u;
const GELU_TANH: u32 = 2u;
const RELU: u32 = 3u;
const SOFT_CAP: u32 = 4u;

struct Params {
    quads: u32,
    // Of a soft cap or a multiplication.
    constant: f32,
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>;

// By exp, clamped: what a shader does with infinity, and tanh of large numbers, is not settled.
fn hyperbolic(v: vec4<f32>) -> vec4<f32> {
    return 1.0 - 2.0 / (exp(clamp(2.0 * v, vec4(-80.0), vec4(80.0))) + 1.0);
}

// Abramowitz and Stegun 1964, formula 7.1.26.
fn erf(v: vec4<f32>) -> vec4<f32> {
    let size = min(abs(v), vec4(9.0));
    let t = 1.0 / (1.0 + 0.3275911 * size);
    var q = vec4(1.061405429);
    q = q * t - 1.453152027;
    q = q * t + 1.421413741;
    q = q * t - 0.284496736;
    q = q * t + 0.254829592;
    return sign(v) * (1.0 - q * t * exp(-size * size));
}

fn function(v: vec4<f32>) -> vec4<f32> {
    if FUNCTION == SILU {
        return v / (1.0 + exp(min(-v, vec4(88.0))));
    }
    if FUNCTION == GELU {
        return 0.5 * v * (1.0 + erf(v * 0.70710678));
    }
    if FUNCTION == GELU_TANH {
        return 0.5 * v * (1.0 + hyperbolic(0.7978846 * (v + 0.044715 * v * v * v)));
    }
    if FUNCTION == RELU {
        return max(v, vec4(0.0));
    }
    if FUNCTION == SOFT_CAP {
        return p.constant * hyperbolic(v / p.constant);
    }
    return p.constant * v;
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let quad = (group.y * groups.x + group.x) * 64u + local;
    if quad >= p.quads {
        return;
    }
    var value = function(y[quad]);
    if GATED {
        value *= x[quad];
    }
    y[quad] = value;
}
