// A block column of a symmetric matrix in another order, with another diagonal:
// out[i - c0][j - c0] = H[order[i]][order[j]], and diagonal[i] where i = j.
//
// The matrix is stored as its lower half in block columns of PANEL (see src/kernels/symmetric.rs).
// One dispatch reads four of these panels and writes the elements that come from them; together the
// dispatches for all panels write every element once.
//
// Dispatch: a thread per element of the result from `first` on, 64 in a workgroup, unfolded over x
// and y. CPU twin: `reordered` in src/kernels/symmetric.rs.

struct Params {
    n: u32,
    c0: u32,
    width: u32, // columns of the result
    panel: u32, // the first of the four panels
    // The elements of the result that this dispatch looks at.
    first: u32,
    end: u32,
}

override PANEL: u32 = 512u;

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> panel0: array<f32>; // [n - k PANEL, PANEL] for panel k
@group(0) @binding(2) var<storage, read> panel1: array<f32>;
@group(0) @binding(3) var<storage, read> panel2: array<f32>;
@group(0) @binding(4) var<storage, read> panel3: array<f32>;
@group(0) @binding(5) var<storage, read> order: array<u32>; // [n]
@group(0) @binding(6) var<storage, read> diagonal: array<f32>; // [n]
@group(0) @binding(7) var<storage, read_write> block: array<f32>; // [n - c0, width]

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let out = p.first + (group.y * groups.x + group.x) * 64u + local;
    if out >= p.end {
        return;
    }
    let i = p.c0 + out / p.width;
    let j = p.c0 + out % p.width;
    let low = min(order[i], order[j]);
    let high = max(order[i], order[j]);
    // A panel before the first wraps round to a large number.
    let source = low / PANEL - p.panel;
    if source >= 4u {
        return;
    }
    let corner = low / PANEL * PANEL;
    let at = (high - corner) * min(PANEL, p.n - corner) + low - corner;
    var value = 0.0;
    if i == j {
        value = diagonal[i];
    } else if source == 0u {
        value = panel0[at];
    } else if source == 1u {
        value = panel1[at];
    } else if source == 2u {
        value = panel2[at];
    } else {
        value = panel3[at];
    }
    block[out] = value;
}
