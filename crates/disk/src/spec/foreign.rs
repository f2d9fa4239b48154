//! The names that other programs have for disks. Nothing here names a disk: each is the path of a file unless
//! there is no such file.

/// The formats of QEMU that this program does not serve.
const FORMATS: [&str; 9] = ["vmdk", "vdi", "vhdx", "vpc", "qed", "qcow", "parallels", "bochs", "luks"];

/// Returns what to write instead of a name in the form of another program, as the end of a sentence.
pub(crate) fn cure(text: &str) -> Option<String> {
    let (scheme, rest) = text.split_once(':')?;
    let format = scheme.to_ascii_lowercase();
    Some(match format.as_str() {
        "nbd" => nbd(rest),
        "file" => {
            let path = rest.strip_prefix("//").filter(|path| path.starts_with('/')).unwrap_or(rest);
            format!("a raw image is its path alone: write {path}")
        }
        "raw" | "host_device" => format!("a raw image is its path alone: write {rest}"),
        "json" => "a description in JSON is QEMU's: write PATH, qcow2:PATH, nbd://HOST/EXPORT or rbd:POOL/IMAGE".into(),
        "http" | "https" | "ftp" | "ftps" => {
            "there are no disks over HTTP or FTP: copy the image, or serve it by nbdkit curl and write nbd://HOST".into()
        }
        "iscsi" => "log in with iscsiadm, and write the path of the block device".into(),
        "nvme" => "write the path of the block device, such as /dev/nvme0n1".into(),
        "ssh" | "gluster" => "mount it, and write the path of the image".into(),
        format if FORMATS.contains(&format) => {
            format!("convert it first: qemu-img convert -O qcow2 {rest} NEW, and write qcow2:NEW")
        }
        word if is_scheme(word) => {
            format!("{scheme}: is no kind of disk: write PATH, qcow2:PATH, nbd://HOST/EXPORT or rbd:POOL/IMAGE")
        }
        _ => return None,
    })
}

/// Returns the URI of a server that is written as QEMU once did: `nbd:HOST:PORT[:exportname=NAME]` or
/// `nbd:unix:PATH[:exportname=NAME]`.
fn nbd(rest: &str) -> String {
    let (server, export) = rest.split_once(":exportname=").unwrap_or((rest, ""));
    let uri = match server.strip_prefix("unix:") {
        Some(path) if !path.is_empty() => format!("nbd+unix:///{export}?socket={path}"),
        None if server.contains(':') => format!("nbd://{server}/{export}"),
        _ => "nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH".into(),
    };
    format!("an NBD server is a URI: write {uri}")
}

/// Returns whether a word could name a kind of disk. A path on a removable disk or of a host has a colon too.
fn is_scheme(word: &str) -> bool {
    word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_programs() {
        for (text, said) in [
            ("nbd:localhost:10809", "write nbd://localhost:10809/"),
            ("nbd:localhost:10809:exportname=web", "write nbd://localhost:10809/web"),
            ("nbd:unix:/run/nbd.sock:exportname=web", "write nbd+unix:///web?socket=/run/nbd.sock"),
            ("nbd:host", "write nbd://HOST/EXPORT"),
            ("file:/srv/a.img", "write /srv/a.img"),
            ("file:///srv/a.img", "write /srv/a.img"),
            ("FILE:a.img", "write a.img"),
            ("raw:a.img", "write a.img"),
            ("json:{\"driver\":\"raw\"}", "a description in JSON"),
            ("https://host/a.img", "nbdkit curl"),
            ("vmdk:a.vmdk", "qemu-img convert -O qcow2 a.vmdk NEW"),
            ("iscsi://host/target", "iscsiadm"),
            ("zfs:pool/a", "zfs: is no kind of disk"),
        ] {
            let cure = cure(text).unwrap();
            assert!(cure.contains(said), "{text}: {cure}");
        }
    }

    #[test]
    fn paths_are_paths() {
        for text in ["/srv/a.img", "a.img", "./nbd:host", "/dev/disk/by-id/scsi-1:0:0", "c:a.img", "a b:c"] {
            assert_eq!(cure(text), None, "{text}");
        }
    }
}
