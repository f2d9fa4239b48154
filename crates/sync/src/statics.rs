//! Statics that hold atomics or locks.

/// Declares a static. There is one for the process; under loom, one for each execution of a model.
#[cfg(not(loom))]
#[macro_export]
macro_rules! process_wide {
    ($(#[$attribute:meta])* $(pub($scope:ident))? static $name:ident: $type:ty = $value:expr;) => {
        $(#[$attribute])*
        $(pub($scope))? static $name: $type = $value;
    };
}

/// Declares a static. There is one for the process; under loom, one for each execution of a model.
#[cfg(loom)]
#[macro_export]
macro_rules! process_wide {
    ($(#[$attribute:meta])* $(pub($scope:ident))? static $name:ident: $type:ty = $value:expr;) => {
        $crate::loom::lazy_static! {
            $(#[$attribute])*
            $(pub($scope))? static ref $name: $type = $value;
        }
    };
}
