//! Compares the lists of system calls of docs/security.md with the profiles.
#![cfg(target_arch = "x86_64")]

use std::collections::BTreeSet;

use kickless_sandbox::{DATA, DATA_WITH_RBD, EXPORTER, OPENER, Profile};

const PAGE: &str = include_str!("../../../docs/security.md");

#[test]
fn the_page_has_each_list() {
    let data = DATA.to_string();
    let of_data: BTreeSet<_> = data.lines().collect();
    let beyond = |profile: &Profile| -> String {
        let list = profile.to_string();
        list.lines().filter(|line| !of_data.contains(line)).map(|line| format!("{line}\n")).collect()
    };
    for list in [data.clone(), beyond(&OPENER), beyond(&EXPORTER), beyond(&DATA_WITH_RBD)] {
        let block = format!("```\n{list}```\n");
        assert!(PAGE.contains(&block), "docs/security.md has to contain this block:\n{block}");
    }
    // The page says that the others share these.
    let (_, common) = data.split_once("\nfutex, ").unwrap();
    let (common, _) = common.split_once("\npread64").unwrap();
    assert!([&OPENER, &EXPORTER].iter().all(|profile| profile.to_string().contains(common)));
}
