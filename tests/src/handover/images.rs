//! Makes the images of a disk with `qemu-img`.

use std::fs::File;
use std::path::Path;

use anyhow::Result;

use crate::handover::oracle::SECTOR;
use crate::handover::store::{LAYERS, Store};
use crate::handover::{Case, Format, Medium};
use crate::qcow2::qemu_img;

/// Makes the images of a disk of zeroes, and returns their names, the topmost first.
///
/// # Errors
/// `qemu-img` fails.
pub fn create(case: &Case, store: &Store, sectors: usize) -> Result<Vec<String>> {
    let names = &LAYERS[..case.layers()];
    if let (Format::Qcow2 { .. }, Some(dir)) = (case.format, store.dir(0)) {
        create_chain(case, &dir, names, sectors)?;
        store.sync(0)?;
    }
    Ok(names.iter().map(ToString::to_string).collect())
}

/// Makes images over one another. The names begin with the topmost.
pub(super) fn create_chain(case: &Case, dir: &Path, names: &[&str], sectors: usize) -> Result<()> {
    let mut under = None;
    for name in names.iter().rev() {
        create_image(case, dir, name, under, sectors)?;
        under = Some(*name);
    }
    Ok(())
}

pub(super) fn create_image(
    case: &Case,
    dir: &Path,
    name: &str,
    under: Option<&str>,
    sectors: usize,
) -> Result<()> {
    let Format::Qcow2 { cluster, subclusters, .. } = case.format else {
        File::create(dir.join(name))?.set_len((sectors * SECTOR) as u64)?;
        return Ok(());
    };
    let extended = if subclusters { "on" } else { "off" };
    let options = format!("cluster_size={cluster},extended_l2={extended}");
    let size = (sectors * SECTOR).to_string();
    let mut words = vec!["create", "-q", "-f", "qcow2", "-o", &options];
    if let Some(under) = under {
        words.extend(["-b", under, "-F", "qcow2"]);
    }
    words.extend([name, &size]);
    qemu_img(dir, &words)?;
    Ok(())
}

/// Commits an image without a look at locks.
pub(super) fn commit_without_locks(case: &Case, dir: &Path, name: &str, under: &str) -> Result<()> {
    let driver = if case.medium == Medium::File { "file" } else { "host_device" };
    let image = |prefix: &str, name: &str| {
        let path = dir.join(name);
        let file = format!("{prefix}file.driver={driver},{prefix}file.locking=off");
        format!("{prefix}driver=qcow2,{file},{prefix}file.filename={}", path.display())
    };
    let options = format!("{},{}", image("", name), image("backing.", under));
    qemu_img(dir, &["commit", "-q", "--image-opts", &options])?;
    Ok(())
}
