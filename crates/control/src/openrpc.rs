//! The description of the calls for clients.

use serde_json::Value;

use super::rpc::RpcError;

/// The OpenRPC document, in `docs/`.
pub const OPENRPC: &str = include_str!("../../../docs/openrpc.json");

/// Returns the OpenRPC document.
pub(crate) fn document() -> Result<Value, RpcError> {
    serde_json::from_str(OPENRPC)
        .map_err(|error| RpcError::failed(format!("the document is no JSON: {error}")))
}
