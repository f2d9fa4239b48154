//! The snapshot table.

use super::bad_image::BadImage;
use super::geometry::Geometry;
use super::header::TableAt;

/// Returns the L1 tables of all snapshots. `bytes` begins with the snapshot table.
pub(crate) fn snapshots(
    _bytes: &[u8],
    count: u32,
    _geometry: Geometry,
    _file_bytes: u64,
) -> Result<Vec<TableAt>, BadImage> {
    if count == 0 { Ok(Vec::new()) } else { Err(BadImage::Snapshots(count)) }
}
