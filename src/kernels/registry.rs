//! The list of all kernels, by which tests hold each shader and its Rust side together.
//!
//! To add a kernel: write `shaders/<name>.wgsl` and, in `kernels/<name>.rs`, its [`Kernel`] and its
//! `Params`; put both into a constant `KERNELS` of that module and that constant into [`registry`].
//! The tests below then compare bindings and layouts, and fail for a shader that is in no list.

use super::{
    activation, add, append, attention, attention_row, ceiling, cholesky, columns, cross_entropy, dequant,
    descend, divergence, embedding, gemm, gemv, keep, layernorm, magnitude,
};
use super::{
    norm, peak, penalize, qmatmul, refit, rmsnorm, rope, scales, scatter, stretch, sweep, swiglu, symmetric,
    topk,
};
use crate::device::Kernel;

/// A kernel and the size in bytes of the `Params` that its dispatches pass.
pub type Registered = (&'static Kernel, usize);

/// Every kernel there is.
pub fn registry() -> Vec<Registered> {
    [
        activation::KERNELS,
        add::KERNELS,
        append::KERNELS,
        attention::KERNELS,
        attention_row::KERNELS,
        ceiling::KERNELS,
        cholesky::KERNELS,
        columns::KERNELS,
        cross_entropy::KERNELS,
        dequant::KERNELS,
        descend::KERNELS,
        divergence::KERNELS,
        embedding::KERNELS,
        gemm::KERNELS,
        gemv::KERNELS,
        keep::KERNELS,
        layernorm::KERNELS,
        magnitude::KERNELS,
        norm::KERNELS,
        peak::KERNELS,
        penalize::KERNELS,
        qmatmul::KERNELS,
        refit::KERNELS,
        rmsnorm::KERNELS,
        rope::KERNELS,
        scales::KERNELS,
        scatter::KERNELS,
        stretch::KERNELS,
        sweep::KERNELS,
        swiglu::KERNELS,
        symmetric::KERNELS,
        topk::KERNELS,
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use naga::{AddressSpace, StorageAccess, TypeInner};

    use super::*;
    use crate::device::{Access, resolve_imports};

    /// Name and text of each file in shaders/.
    fn files() -> Vec<(String, String)> {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders");
        let mut files = vec![];
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "wgsl") {
                let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
                files.push((name, std::fs::read_to_string(&path).unwrap()));
            }
        }
        files
    }

    fn parse(name: &str, source: &str) -> naga::Module {
        let text = resolve_imports(source).unwrap();
        let module = naga::front::wgsl::parse_str(&text)
            .unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(&text)));
        // Nothing beyond what every browser has; naga counts unpack2x16float as an extra, WebGPU does
        // not.
        let capabilities = naga::valid::Capabilities::SHADER_FLOAT16_IN_FLOAT32;
        naga::valid::Validator::new(naga::valid::ValidationFlags::all(), capabilities)
            .validate(&module)
            .unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(&text)));
        module
    }

    /// The size of a uniform block without gaps, whose layout is then that of a Rust struct that has
    /// none either (as bytemuck's derive assures) with the same members.
    fn packed_size(module: &naga::Module, ty: naga::Handle<naga::Type>) -> usize {
        let mut layouter = naga::proc::Layouter::default();
        layouter.update(module.to_ctx()).unwrap();
        let name = module.types[ty].name.clone();
        let TypeInner::Struct { members, span } = &module.types[ty].inner else {
            return layouter[ty].size as usize;
        };
        let mut end = 0;
        for member in members {
            assert_eq!(member.offset, end, "a gap in {name:?} before {:?}", member.name);
            end += layouter[member.ty].size;
        }
        assert_eq!(*span, end, "a gap at the end of {name:?}");
        end as usize
    }

    #[test]
    fn every_shader_is_valid_for_every_browser() {
        for (name, source) in files() {
            let module = parse(&name, &source);
            let [entry] = &module.entry_points[..] else { panic!("{name}: not one entry point") };
            assert_eq!((&*entry.name, entry.stage), ("main", naga::ShaderStage::Compute), "{name}");
            let size = entry.workgroup_size.iter().product::<u32>();
            assert!(size <= 256, "{name}: {size} threads in a workgroup");
        }
    }

    #[test]
    fn shaders_use_nothing_optional() {
        for (name, source) in files() {
            for line in resolve_imports(&source).unwrap().lines() {
                let code = line.split("//").next().unwrap();
                let mut words = code.split(|c: char| !(c.is_alphanumeric() || c == '_'));
                let optional = |word: &str| {
                    matches!(word, "enable" | "requires" | "diagnostic" | "f16" | "immediate")
                        || word.starts_with("subgroup")
                        || word.starts_with("quadSwap")
                        || word.ends_with('h') && word.len() > 1 && word.as_bytes()[0].is_ascii_digit()
                };
                assert!(!words.any(optional), "{name}: {line}");
            }
        }
    }

    /// Names of the shaders that the Rust files in `folder` include.
    fn included(folder: &std::path::Path) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                names.extend(included(&path));
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            for include in text.split("include_str!(\"").skip(1) {
                let file = include.split('"').next().unwrap();
                if let Some((_, name)) = file.rsplit_once("/shaders/") {
                    names.insert(name.trim_end_matches(".wgsl").to_owned());
                }
            }
        }
        names
    }

    #[test]
    fn every_kernel_is_in_the_registry_under_its_name() {
        let kernels = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernels");
        let used = included(&kernels);
        let listed: BTreeSet<String> = registry().iter().map(|(kernel, _)| kernel.name.to_owned()).collect();
        assert_eq!(used, listed, "put the KERNELS of each module into kernels::registry()");
        for (name, source) in files() {
            let mut kernels = registry().into_iter().filter(|(kernel, _)| kernel.name == name);
            assert!(kernels.all(|(kernel, _)| kernel.source == source), "{name} includes another file");
        }
    }

    #[test]
    fn bindings_and_parameters_are_those_of_the_rust_side() {
        for (kernel, params) in registry() {
            let name = kernel.name;
            let module = parse(name, kernel.source);
            let mut bindings = vec![None; kernel.bindings.len()];
            let mut uniform = None;
            for (_, variable) in module.global_variables.iter() {
                let Some(at) = variable.binding else { continue };
                assert_eq!(at.group, 0, "{name}");
                match variable.space {
                    AddressSpace::Uniform => {
                        assert_eq!(at.binding, 0, "{name}: the uniform block must be binding 0");
                        uniform = Some(packed_size(&module, variable.ty));
                    }
                    AddressSpace::Storage { access } => {
                        let writes = access.contains(StorageAccess::STORE);
                        let slot = bindings.get_mut(at.binding as usize - 1);
                        let slot =
                            slot.unwrap_or_else(|| panic!("{name}: binding {} is not listed", at.binding));
                        *slot = Some(if writes { Access::ReadWrite } else { Access::Read });
                    }
                    other => panic!("{name}: a binding in {other:?}"),
                }
            }
            let wanted: Vec<_> = kernel.bindings.iter().copied().map(Some).collect();
            assert_eq!(bindings, wanted, "{name}: bindings 1, 2, …");
            assert_eq!(uniform.unwrap_or(0), params, "{name}: bytes of parameters");
            assert!(params <= 256, "{name}: a slot of the arena has 256 bytes");
        }
    }
}
