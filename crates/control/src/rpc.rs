//! JSON-RPC 2.0: requests, and the lines that answer them.
//!
//! A request is one object on one line. Its parameters have names. There are no batches.

use kickless_opener::is_descriptor_name;
use serde_json::{Map, Value, json};

use super::inbox::DESCRIPTORS_MAX;

/// The text is not JSON.
const PARSE_ERROR: i64 = -32700;
/// The JSON is not a request.
const INVALID_REQUEST: i64 = -32600;
/// No call has this name.
const METHOD_NOT_FOUND: i64 = -32601;
/// The parameters do not fit the call.
const INVALID_PARAMS: i64 = -32602;
/// The call failed. The message has the reason.
const FAILED: i64 = -32000;
/// The socket serves only calls that change nothing.
const READ_ONLY: i64 = -32001;
/// The daemon executes as many calls, or serves as many clients, as it can, or passes to another process.
const BUSY: i64 = -32002;
/// The user of the client may not make this call.
const NOT_ALLOWED: i64 = -32003;

/// A request of a client.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The client's name of the request, for the answer. A request without it gets no answer.
    pub id: Option<Value>,
    /// The call.
    pub method: String,
    /// The parameters by name.
    pub params: Map<String, Value>,
    /// The names of the descriptors that come with the line, in their order.
    pub fds: Vec<String>,
}

/// The error of a request. A client shows its message to an operator.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct RpcError {
    /// One of the codes of JSON-RPC 2.0 or of the OpenRPC document.
    pub code: i64,
    /// The reason, as one sentence.
    pub message: String,
}

impl RpcError {
    fn new(code: i64, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// Returns the error of a call with an unknown name.
    pub(crate) fn no_method(why: impl Into<String>) -> Self {
        Self::new(METHOD_NOT_FOUND, why)
    }

    /// Returns the error of parameters that do not fit the call.
    pub(crate) fn params(why: impl Into<String>) -> Self {
        Self::new(INVALID_PARAMS, why)
    }

    /// Returns the error of a call that failed.
    pub fn failed(why: impl Into<String>) -> Self {
        Self::new(FAILED, why)
    }

    /// Returns the error of a call that this socket does not serve.
    pub(crate) fn read_only(name: &str) -> Self {
        Self::new(READ_ONLY, format!("{name} changes the daemon, and this socket is read-only"))
    }

    /// Returns the error of a call that finds no room.
    pub fn busy(why: impl Into<String>) -> Self {
        Self::new(BUSY, why)
    }

    /// Returns the error of a call that the client's user may not make.
    pub(crate) fn not_allowed(why: impl Into<String>) -> Self {
        Self::new(NOT_ALLOWED, why)
    }

    /// Returns the error of a line that is not taken.
    pub(crate) fn line(why: impl Into<String>) -> Self {
        Self::new(INVALID_REQUEST, why)
    }
}

/// A request that is refused before its call is known: the id for the answer, and the reason.
pub type Refused = (Value, RpcError);

impl Request {
    /// Parses a line.
    ///
    /// # Errors
    /// The line is not a request.
    pub fn parse(line: &[u8]) -> Result<Self, Refused> {
        let invalid = |id: &Value, why: &str| {
            (id.clone(), RpcError::new(INVALID_REQUEST, format!("no request: {why}")))
        };
        let none = Value::Null;
        let value: Value = serde_json::from_slice(line)
            .map_err(|error| (Value::Null, RpcError::new(PARSE_ERROR, format!("no JSON: {error}"))))?;
        let mut object = match value {
            Value::Object(object) => object,
            Value::Array(_) => return Err(invalid(&none, "a line has one object, not an array")),
            _ => return Err(invalid(&none, "a line has one object")),
        };
        let id = match object.remove("id") {
            id @ (None | Some(Value::Null | Value::String(_) | Value::Number(_))) => id,
            Some(_) => return Err(invalid(&none, "id must be text, a number or null")),
        };
        let shown = id.clone().unwrap_or_default();
        if object.remove("jsonrpc") != Some(Value::from("2.0")) {
            return Err(invalid(&shown, "jsonrpc must be \"2.0\""));
        }
        let Some(Value::String(method)) = object.remove("method") else {
            return Err(invalid(&shown, "method must be text"));
        };
        let params = match object.remove("params") {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(params)) => params,
            Some(_) => {
                return Err((shown, RpcError::params("params must be an object: parameters have names")));
            }
        };
        let fds = match object.remove("fds") {
            None => Vec::new(),
            Some(names) => descriptor_names(names).map_err(|why| (shown.clone(), RpcError::params(why)))?,
        };
        match object.keys().next() {
            None => Ok(Self { id, method, params, fds }),
            Some(key) => {
                Err(invalid(&shown, &format!("it has no {:?}", key.chars().take(64).collect::<String>())))
            }
        }
    }

    /// Returns the line of this request.
    pub(crate) fn line(&self) -> String {
        let Self { id, method, params, fds } = self;
        let mut request = json!({ "jsonrpc": "2.0", "method": method, "params": params });
        if let Some(id) = id {
            request["id"] = id.clone();
        }
        if !fds.is_empty() {
            request["fds"] = fds.as_slice().into();
        }
        format!("{request}\n")
    }
}

/// Reads the names of descriptors.
fn descriptor_names(names: Value) -> Result<Vec<String>, String> {
    let wrong =
        || format!("fds: give 1 to {DESCRIPTORS_MAX} names, each a letter, then letters, digits, _ and -");
    let Value::Array(names) = names else { return Err(wrong()) };
    // Before the names are compared with one another.
    if !(1..=DESCRIPTORS_MAX).contains(&names.len()) {
        return Err(wrong());
    }
    let mut fds: Vec<String> = Vec::new();
    for name in names {
        match name {
            Value::String(name) if fds.contains(&name) => return Err(format!("fds: {name} is there twice")),
            Value::String(name) if is_descriptor_name(&name) => fds.push(name),
            _ => return Err(wrong()),
        }
    }
    Ok(fds)
}

/// Returns the line of a notification, which a client that has subscribed gets.
pub(crate) fn notification(method: &str, params: &Value) -> String {
    format!("{}\n", json!({ "jsonrpc": "2.0", "method": method, "params": params }))
}

/// Returns the line that answers a request.
pub fn answer(id: &Value, result: &Result<Value, RpcError>) -> String {
    let answer = match result {
        Ok(result) => json!({ "jsonrpc": "2.0", "id": id, "result": result }),
        Err(RpcError { code, message }) => {
            json!({ "jsonrpc": "2.0", "id": id, "error": { "code": code, "message": message } })
        }
    };
    format!("{answer}\n")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests() {
        let parsed =
            Request::parse(br#"{"jsonrpc":"2.0","id":7,"method":"a.b","params":{"name":"c"}}"#).unwrap();
        assert_eq!((parsed.id.clone(), parsed.method.as_str()), (Some(json!(7)), "a.b"));
        assert_eq!(parsed.params["name"], "c");
        assert_eq!(Request::parse(parsed.line().trim_end().as_bytes()), Ok(parsed));
        let silent = Request::parse(br#"{"jsonrpc":"2.0","method":"a"}"#).unwrap();
        assert!(silent.id.is_none() && silent.params.is_empty() && silent.fds.is_empty());
        let line = br#"{"jsonrpc":"2.0","method":"a","fds":["image","q-1"]}"#;
        let parsed = Request::parse(line).unwrap();
        assert_eq!(parsed.fds, ["image", "q-1"]);
        assert_eq!(Request::parse(parsed.line().trim_end().as_bytes()), Ok(parsed));
    }

    #[test]
    fn lines_that_are_no_requests() {
        for (line, code, id) in [
            ("", PARSE_ERROR, Value::Null),
            ("{", PARSE_ERROR, Value::Null),
            ("\u{0}", PARSE_ERROR, Value::Null),
            ("7", INVALID_REQUEST, Value::Null),
            ("[]", INVALID_REQUEST, Value::Null),
            (r#"{"id":1}"#, INVALID_REQUEST, json!(1)),
            (r#"{"id":{},"jsonrpc":"2.0","method":"a"}"#, INVALID_REQUEST, Value::Null),
            (r#"{"id":"x","jsonrpc":"1.0","method":"a"}"#, INVALID_REQUEST, json!("x")),
            (r#"{"id":1,"jsonrpc":"2.0","method":7}"#, INVALID_REQUEST, json!(1)),
            (r#"{"id":1,"jsonrpc":"2.0","method":"a","params":[1]}"#, INVALID_PARAMS, json!(1)),
            (r#"{"id":1,"jsonrpc":"2.0","method":"a","fds":"a"}"#, INVALID_PARAMS, json!(1)),
            (r#"{"id":1,"jsonrpc":"2.0","method":"a","fds":[]}"#, INVALID_PARAMS, json!(1)),
            (r#"{"id":1,"jsonrpc":"2.0","method":"a","fds":[3]}"#, INVALID_PARAMS, json!(1)),
            (r#"{"id":1,"jsonrpc":"2.0","method":"a","fds":["3"]}"#, INVALID_PARAMS, json!(1)),
            (r#"{"id":1,"jsonrpc":"2.0","method":"a","fds":["a","a"]}"#, INVALID_PARAMS, json!(1)),
            (r#"{"id":1,"jsonrpc":"2.0","method":"a","more":1}"#, INVALID_REQUEST, json!(1)),
        ] {
            let (shown, error) = Request::parse(line.as_bytes()).unwrap_err();
            assert_eq!((shown, error.code), (id, code), "{line}");
            assert!(!error.message.is_empty() && !error.message.contains('\n'), "{line}: {error}");
        }
        let many: Vec<String> = (0..=DESCRIPTORS_MAX).map(|number| format!("a{number}")).collect();
        let line = json!({ "id": 1, "jsonrpc": "2.0", "method": "a", "fds": many });
        assert_eq!(Request::parse(line.to_string().as_bytes()).unwrap_err().1.code, INVALID_PARAMS);
        let deep = format!("{}{}", "[".repeat(50_000), "]".repeat(50_000));
        assert_eq!(Request::parse(deep.as_bytes()).unwrap_err().1.code, PARSE_ERROR);
    }

    proptest! {
        #[test]
        fn no_line_panics(line in prop::collection::vec(any::<u8>(), 0..200), text in "[\\[\\]{}\":,0-9a-z. ]{0,80}") {
            let _ = Request::parse(&line);
            let _ = Request::parse(text.as_bytes());
        }

        #[test]
        fn answers_are_one_line(text in "\\PC{0,40}\n?\\PC{0,40}") {
            for result in [Ok(json!(text)), Err(RpcError::failed(text.clone()))] {
                let line = answer(&json!(text), &result);
                prop_assert_eq!(line.matches('\n').count(), 1);
                prop_assert!(line.ends_with('\n'));
            }
        }
    }
}
