//! Prints the answer of `--print-capabilities`. Management tools call it before they start a back-end.
//!
//! The format is QEMU's, `VHostUserBackendCapabilities` in its `docs/interop/vhost-user.json`.

use serde_json::json;

/// Returns the capabilities of the block back-end, with the features of `VHostUserBackendBlockFeature`.
pub(crate) fn blk() -> String {
    json!({ "type": "block", "features": ["read-only", "blk-file"] }).to_string()
}

/// Returns the capabilities of the network back-end. QEMU defines no features for it.
pub(crate) fn net() -> String {
    json!({ "type": "net" }).to_string()
}
