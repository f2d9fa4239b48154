//! The files that a benchmark writes.

use std::fs::{File, OpenOptions};
use std::io::{Seek, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};

use super::common_options::OutputOptions;
use super::report;
use super::results::Results;
use super::table;

/// Formats the results as the content of a file.
type Format = fn(&Results) -> Result<String>;

/// The files, open before the first turn, so that a long run is not in vain.
#[derive(Debug)]
pub(crate) struct Outputs(Vec<(PathBuf, File, Format)>);

impl Outputs {
    /// Opens the files. A file that is there keeps its content until [`Outputs::write`].
    ///
    /// # Errors
    /// A file cannot be written to.
    pub(crate) fn open(options: &OutputOptions) -> Result<Self> {
        let all: [(&Option<PathBuf>, Format); 5] = [
            (&options.report, report::page),
            (&options.plot, report::first_plot),
            (&options.plot_rate, report::over_rate),
            (&options.plot_time, report::over_time),
            (&options.markdown, |results| Ok(table::markdown(results))),
        ];
        let mut files = Vec::new();
        for (path, format) in all.into_iter().filter_map(|(path, format)| Some((path.as_ref()?, format))) {
            let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
            files.push((path.clone(), file.with_context(|| failure(path))?, format));
        }
        Ok(Self(files))
    }

    /// Writes the results into all files.
    ///
    /// # Errors
    /// A file cannot be written to, or a plot cannot be drawn.
    pub(crate) fn write(self, results: &Results) -> Result<()> {
        for (path, mut file, format) in self.0 {
            let text = format(results)?;
            let is_file = file.metadata().is_ok_and(|status| status.is_file());
            // Pipes and devices have no length.
            let emptied = if is_file { file.rewind().and_then(|()| file.set_len(0)) } else { Ok(()) };
            emptied.and_then(|()| file.write_all(text.as_bytes())).with_context(|| failure(&path))?;
        }
        Ok(())
    }
}

fn failure(path: &std::path::Path) -> String {
    format!("{} cannot be written", path.display())
}
