//! Makes the header, as `include/kickless_driver.h` beside the library in the target directory, and names the library.

use std::env;
use std::error::Error;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("no directory")?);
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("no place for output")?);
    // PROFILE/build/PACKAGE/out.
    let profile = out.ancestors().nth(3).ok_or("no target directory")?;
    let config = here.join("cbindgen.toml");
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed={}", config.display());

    let builder = cbindgen::Builder::new().with_config(cbindgen::Config::from_file(&config)?);
    let header = builder.with_src(here.join("src/lib.rs")).generate()?;
    header.write_to_file(profile.join("include/kickless_driver.h"));

    // As long as the first number is 0, each second one may break what was built with another.
    let (major, minor) = (env::var("CARGO_PKG_VERSION_MAJOR")?, env::var("CARGO_PKG_VERSION_MINOR")?);
    let version = if major == "0" { format!("0.{minor}") } else { major };
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libkickless_driver.so.{version}");
    Ok(())
}
