//! `--print-capabilities`: what a management tool asks a back-end before it starts one.

use serde_json::json;

/// The capabilities of the block back-end, as QEMU `docs/interop/vhost-user.json` wants them (`VHostUserBackendCapabilities`
/// with the features of `VHostUserBackendBlockFeature`).
pub(crate) fn blk() -> String {
    json!({ "type": "block", "features": ["read-only", "blk-file"] }).to_string()
}
