//! How a kernel is launched: by name, with the number of workgroups, of work-items in each, and its arguments in order.

/// `launch!(hip, "name", [x, y, z], work_items; arguments...)`: queues a kernel in the backend's stream. Fewer dimensions may be given.
/// Nothing is queued where there are no workgroups.
macro_rules! launch {
    ($hip:expr, $name:expr, [$x:expr], $items:expr; $($argument:expr),* $(,)?) => {
        launch!($hip, $name, [$x, 1, 1], $items; $($argument),*)
    };
    ($hip:expr, $name:expr, [$x:expr, $y:expr], $items:expr; $($argument:expr),* $(,)?) => {
        launch!($hip, $name, [$x, $y, 1], $items; $($argument),*)
    };
    ($hip:expr, $name:expr, [$x:expr, $y:expr, $z:expr], $items:expr; $($argument:expr),* $(,)?) => {{
        let workgroups = [$x, $y, $z].map(|n| u32::try_from(n).expect("workgroups of a micro-batch are fewer than 2^32"));
        let arguments = hip_sys::Arguments::new()$(.with($argument))*;
        $crate::tensor::hip::launch::queue($hip, $name, workgroups, $items, &arguments)
    }};
}

use std::hash::Hash as _;

use anyhow::{Context, Result};
use hip_sys::{Arguments, Launch};

use super::Hip;
use super::graph::Fate;

/// Queues a kernel; `launch!` is how it is written.
pub(super) fn queue(hip: &Hip, name: &'static str, workgroups: [u32; 3], work_items: u32, arguments: &Arguments) -> Result<()> {
    let Some(device) = hip.device().filter(|_| !workgroups.contains(&0)) else { return Ok(()) };
    if hip.fate(|to| (name, workgroups, work_items, arguments.cells()).hash(to)) == Fate::Skip {
        return Ok(());
    }
    let shape = Launch { workgroups, work_items: [work_items, 1, 1], shared_bytes: 0 };
    // SAFETY: the verbs give each kernel the arguments that its source lists, with buffers of the sizes it documents. They lie in the
    // arena, whose blocks are given out again only to what is queued later in the same stream.
    unsafe { device.kernels.launch(name, &device.stream, shape, arguments) }.with_context(|| format!("queuing kernel {name}"))
}
