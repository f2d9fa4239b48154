//! Counts the instructions of loads. Their number is the same each time.

use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::process::Command;

/// The argument of the process that valgrind runs.
const COUNTED: &str = "--counted";
/// The argument that asks for nothing but instructions.
const ALONE: &str = "--instructions";
/// The file to which callgrind writes at the end. It adds a number for each load.
const PROFILE: &str = "profile";

/// A load of a benchmark whose instructions are counted.
pub struct CountedLoad {
    name: String,
    units: u32,
    run: Box<dyn Fn()>,
}

impl CountedLoad {
    /// Returns a load with a name without spaces. `run` carries out `units` requests or frames. Functions
    /// whose names contain `counted_submit` or `counted_complete` are counted, and the functions that these
    /// call.
    pub fn new(name: String, units: u32, run: impl Fn() + 'static) -> Self {
        Self { name, units, run: Box::new(run) }
    }
}

/// Prints the instructions of each load for a request or a frame, one load a line. Returns whether the
/// program measures something else too: it does not if `--instructions` is among its arguments.
///
/// The program must call this before anything else, because valgrind runs it anew.
pub fn print_instructions(loads: &[CountedLoad]) -> bool {
    let has = |word: &str| std::env::args().any(|argument| argument == word);
    if has(COUNTED) {
        for load in loads {
            (load.run)();
            end_of_load();
        }
        return false;
    }
    match counted_instructions(loads.len()) {
        Some(counts) => {
            for (load, count) in loads.iter().zip(counts) {
                println!("{} {:.1}", load.name, count as f64 / f64::from(load.units));
            }
        }
        None => println!("valgrind cannot count instructions here"),
    }
    !has(ALONE)
}

/// Tells callgrind that a load is over.
#[inline(never)]
fn end_of_load() {
    black_box(COUNTED);
}

/// Runs this program in valgrind, and returns its own instructions in each load. Those of the C library do
/// not count, because its copies depend on the processor. Returns `None` if valgrind cannot count them.
fn counted_instructions(loads: usize) -> Option<Vec<u64>> {
    let dir = tempfile::tempdir().ok()?;
    let profile = dir.path().join(PROFILE);
    let program = std::env::current_exe().ok()?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--collect-atstart=no", "--compress-strings=no", "--compress-pos=no"])
        .args(["--toggle-collect=*counted_submit*", "--toggle-collect=*counted_complete*"])
        .arg("--dump-before=*end_of_load*")
        .arg(format!("--callgrind-out-file={}", profile.display()))
        // As cargo runs a benchmark.
        .args([program.as_os_str(), COUNTED.as_ref(), "--bench".as_ref()])
        .output()
        .ok()?;
    let count = |load: usize| {
        let text = fs::read_to_string(profile.with_extension((load + 1).to_string())).ok()?;
        own_instructions(&text, &program).filter(|count| *count > 0)
    };
    (0..loads).map(count).collect::<Option<_>>().filter(|_| output.status.success())
}

/// Returns the sum of the instructions in the functions of a program.
fn own_instructions(profile: &str, program: &Path) -> Option<u64> {
    let (mut sum, mut is_own, mut is_of_call) = (0, false, false);
    for line in profile.lines() {
        if let Some(object) = line.strip_prefix("ob=") {
            is_own = Path::new(object) == program;
        } else if line.starts_with("calls=") {
            // The next line has the sum of the function that is called.
            is_of_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit())
            && !std::mem::take(&mut is_of_call)
            && is_own
        {
            sum += line.split(' ').nth(1)?.parse::<u64>().ok()?;
        }
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use super::own_instructions;
    use std::path::Path;

    #[test]
    fn instructions_of_libraries_and_of_callees_are_left_out() {
        let profile = "version: 1\nsummary: 1000\n\nob=/program\nfl=a.rs\nfn=a\n10 5\ncob=/libc.so\ncfn=memcpy\n\
            calls=3 0\n11 300\n12 7\n\nob=/libc.so\nfn=memcpy\n0 300\n\nob=/program\nfn=b\n0 20\ntotals: 1000\n";
        assert_eq!(own_instructions(profile, Path::new("/program")), Some(32));
        assert_eq!(own_instructions("ob=/program\n1 x\n", Path::new("/program")), None);
    }
}
