//! Generates the header `include/kickless_driver.h` beside the library in the target directory, and sets the
//! library's soname.

use std::env;
use std::error::Error;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set")?);
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    // PROFILE/build/PACKAGE/out.
    let profile = out.ancestors().nth(3).ok_or("OUT_DIR is not in a target directory")?;
    let config = here.join("cbindgen.toml");
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed={}", config.display());

    let builder = cbindgen::Builder::new().with_config(cbindgen::Config::from_file(&config)?);
    let header = builder.with_src(here.join("src/lib.rs")).generate()?;
    header.write_to_file(profile.join("include/kickless_driver.h"));

    // While the major version is 0, each minor version may be incompatible.
    let (major, minor) = (env::var("CARGO_PKG_VERSION_MAJOR")?, env::var("CARGO_PKG_VERSION_MINOR")?);
    let version = if major == "0" { format!("0.{minor}") } else { major };
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libkickless_driver.so.{version}");
    Ok(())
}
