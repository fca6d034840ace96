//! Every check of the emulator must catch the fault it is for.

mod common;

use common::{Argument, Buffer, compile, launch, load};
use swgpu::exec::launch::{Fault, Module};
use swgpu::isa::LoadError;

const ONE: [u32; 3] = [1, 1, 1];
const WAVE: [u32; 3] = [64, 1, 1];

fn fault(kernel: &str, workgroup: [u32; 3], arguments: &[Argument]) -> Option<Box<Fault>> {
    let module = load("wrong")?;
    Some(launch(&module, kernel, ONE, workgroup, arguments).expect_err("the fault is caught"))
}

#[test]
fn store_beyond_the_end() {
    let out = Buffer::unwritten::<f32>(64);
    let Some(fault) = fault("beyond_the_end", WAVE, &[Argument::Buffer(&out), Argument::U32(1)]) else { return };
    // Lane 63 is the first beyond the end, at the end exactly.
    let end = format!("{:#x}", out.address() + 256);
    assert!(
        fault.problem.contains("lane 63") && fault.problem.contains(&end) && fault.problem.contains("outside every live"),
        "{fault}"
    );
    assert!(fault.instruction.starts_with("global_store_dword"), "{fault}");
}

#[test]
fn host_pointer_in_a_kernel() {
    let out = Buffer::unwritten::<f32>(64);
    let host = [0f32; 64];
    let Some(fault) = fault("read_anywhere", WAVE, &[Argument::Buffer(&out), Argument::Address(host.as_ptr() as u64)]) else {
        return;
    };
    assert!(fault.problem.contains("outside every live allocation"), "{fault}");
}

#[test]
fn freed_memory() {
    let out = Buffer::unwritten::<f32>(64);
    let freed = Buffer::of(&[1f32; 64]).address();
    let Some(fault) = fault("read_anywhere", WAVE, &[Argument::Buffer(&out), Argument::Address(freed)]) else { return };
    assert!(fault.problem.contains("outside every live allocation"), "{fault}");
}

#[test]
fn memory_that_nobody_wrote() {
    let (out, source) = (Buffer::unwritten::<f32>(64), Buffer::unwritten::<f32>(64));
    let Some(fault) = fault("read_anywhere", WAVE, &[Argument::Buffer(&out), Argument::Buffer(&source)]) else { return };
    assert!(fault.problem.contains("never written"), "{fault}");
    assert!(fault.instruction.starts_with("global_load_dword"), "{fault}");
}

#[test]
fn lds_beyond_the_end() {
    let out = Buffer::unwritten::<f32>(64);
    let Some(fault) = fault("beyond_lds", WAVE, &[Argument::Buffer(&out), Argument::U32(1)]) else { return };
    assert!(fault.problem.contains("outside the workgroup's 256 bytes of LDS"), "{fault}");
}

#[test]
fn lds_that_nobody_wrote() {
    let out = Buffer::unwritten::<f32>(64);
    let Some(fault) = fault("unwritten_lds", WAVE, &[Argument::Buffer(&out), Argument::U32(63)]) else { return };
    assert!(fault.problem.contains("never written"), "{fault}");
    let module = load("wrong").expect("compiled above");
    launch(&module, "unwritten_lds", ONE, WAVE, &[Argument::Buffer(&out), Argument::U32(64)])
        .expect("all of it written: no fault");
}

#[test]
fn barrier_that_a_wave_never_reaches() {
    let out = Buffer::unwritten::<f32>(64);
    let Some(fault) = fault("early_exit", [128, 1, 1], &[Argument::Buffer(&out)]) else { return };
    assert!(fault.problem.contains("1 waves wait at a barrier that 1 waves"), "{fault}");
    assert_eq!(fault.instruction, "s_barrier");
}

#[test]
fn endless_loop() {
    // SAFETY: no other thread of this test program reads the environment before the settings are made.
    unsafe { std::env::set_var("SWGPU_MAX_INSTRUCTIONS", "200000") };
    let out = Buffer::of(&[0u32; 2]);
    let Some(fault) = fault("endless", WAVE, &[Argument::Buffer(&out)]) else { return };
    assert!(fault.problem.contains("endless loop"), "{fault}");
}

#[test]
fn unsupported_instruction_is_named() {
    let out = Buffer::unwritten::<u32>(64);
    let Some(fault) = fault("unknown_instruction", WAVE, &[Argument::Buffer(&out)]) else { return };
    assert!(fault.problem.contains("not emulated") && fault.instruction.starts_with("v_msad_u8"), "{fault}");
}

#[test]
fn trap() {
    let out = Buffer::of(&[7u32, 0]);
    let Some(fault) = fault("traps", WAVE, &[Argument::Buffer(&out)]) else { return };
    assert!(fault.problem.contains("trapped"), "{fault}");
}

#[test]
fn misaligned_atomic() {
    let out = Buffer::of(&[0u32; 4]);
    let module = load("wrong");
    let Some(module) = module else { return };
    let offset = Argument::Address(2);
    let fault = launch(&module, "misaligned_atomic", ONE, WAVE, &[Argument::Buffer(&out), offset]).expect_err("caught");
    assert!(fault.problem.contains("no multiple of 4"), "{fault}");
}

#[test]
fn scratch_is_refused_when_loading() {
    let Some(object) = compile("spills") else { return };
    match Module::load(&object, 0) {
        Err(LoadError::Kernel { kernel, problem }) => {
            assert!(kernel == "uses_scratch" && problem.contains("scratch"), "{problem}")
        }
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[test]
fn damaged_objects_are_refused() {
    let Some(object) = compile("wrong") else { return };
    assert!(Module::load(b"not an ELF file", 0).is_err());
    assert!(Module::load(&object[..200], 0).is_err());
}
