//! Lets tests make an upgrade fail at each of its steps. A release build calls nothing.

/// An end of an upgrade.
#[cfg_attr(not(debug_assertions), expect(unreachable_pub, reason = "only debug builds export it"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The process that gives.
    Old,
    /// The process that takes over.
    New,
}

/// Called when an end has come to a step of an upgrade. An error fails the upgrade there.
#[cfg(debug_assertions)]
pub type StepHook = fn(End, u32) -> Result<(), String>;

#[cfg(debug_assertions)]
static HOOK: std::sync::OnceLock<StepHook> = std::sync::OnceLock::new();

/// Sets the function that each step calls. Ignores all but the first.
#[cfg(debug_assertions)]
pub fn set_step_hook(hook: StepHook) {
    let _ = HOOK.set(hook);
}

/// Notes that an end has come to a step.
#[cfg(debug_assertions)]
pub(super) fn step(end: End, step: u32) -> Result<(), String> {
    HOOK.get().map_or(Ok(()), |hook| hook(end, step))
}

#[cfg(not(debug_assertions))]
pub(super) fn step(_: End, _: u32) -> Result<(), String> {
    Ok(())
}
