//! Runs `kickless bench` against real back-ends.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its own functions too")]

mod bench_results;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use kickless_tests::daemon::{
    CardConfig, Daemon, DaemonConfig, Program, check_sandbox, child_command, kickless_binary, repository,
};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_getaffinity};
use serde_json::Value;

/// The size is in bytes, as the storage daemon requires.
const NULL: &str = "null:67108864";

fn serve(program: Program, disk: &str) -> Daemon {
    Daemon::start(&DaemonConfig { program, ..DaemonConfig::new(disk) }).unwrap()
}

fn bench(arguments: &[&str]) -> Output {
    let output = Command::new(kickless_binary().unwrap()).arg("bench").args(arguments).output().unwrap();
    // The programs that it starts log there too.
    check_sandbox(String::from_utf8_lossy(&output.stderr).lines()).unwrap();
    output
}

fn on(daemon: &Daemon, arguments: &str) -> Output {
    let socket = format!("--socket-path={}", daemon.socket().display());
    let time = if arguments.contains("--time") { None } else { Some("--time=50ms") };
    let words = ["blk", &socket, "--warm-up=5ms"];
    bench(&words.into_iter().chain(time).chain(arguments.split_whitespace()).collect::<Vec<_>>())
}

/// Starts `kickless bench blk` with these arguments and waits until it has connected.
fn start(daemon: &Daemon, arguments: &str) -> Child {
    let socket = format!("--socket-path={}", daemon.socket().display());
    let seen = daemon.log().len();
    let child = child_command(kickless_binary().unwrap())
        .args(["bench", "blk", &socket])
        .args(arguments.split_whitespace())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let connected = |line: &str| line.contains("front-end connected").then_some(());
    daemon.log().wait_from(seen, "a front-end", Duration::from_secs(30), connected).unwrap();
    child
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Returns the results of a run, which must succeed.
fn results(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    parsed(output)
}

/// Returns the results of a run, which are as their schema says.
fn parsed(output: &Output) -> Value {
    let results = serde_json::from_slice(&output.stdout).unwrap();
    bench_results::check(&results).unwrap();
    results
}

/// Returns the one sentence on standard error of a run, which must fail.
fn sentence(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    let said = text(&output.stderr);
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

#[test]
fn all_loads_run_on_both_back_ends() {
    for program in [Program::Kickless, Program::StorageDaemon] {
        let daemon = serve(program, NULL);
        let pid = format!("--pid={}", daemon.pid());
        let loads =
            "--depth=1,32 --block-size=4K,64K --read=100,50,0 --wait=sleep,poll --pattern=random,sequential";
        let results = results(&on(&daemon, &format!("{pid} {loads} --destroy --queues=2 --json")));
        let loads = results["loads"].as_array().unwrap();
        assert_eq!(loads.len(), 48);
        let mut measured = 0;
        for load in loads {
            let target = &load["targets"][0];
            // On a busy machine, none of the threads may run for a moment.
            let any = target["iops"]["median"].as_f64().unwrap() > 0.0;
            measured += usize::from(any);
            assert!(!any || target["latency"]["p50"].as_u64().unwrap() > 0, "{load}");
            assert!(target["latency"]["p50"].as_u64() <= target["latency"]["max"].as_u64(), "{load}");
            assert!(target["driver_cpu_per_request"]["median"].as_f64().unwrap() > 0.0, "{load}");
            assert!(target["back_end_cpu_per_request"]["median"].is_number(), "{load}");
            assert!(target["kicks_per_request"]["median"].as_f64().unwrap() <= 1.0, "{load}");
            assert_eq!(target["failed"], 0, "{load}");
            // Reads and writes are apart if there are both.
            let operations = target["operations"].as_array().unwrap();
            assert_eq!(operations.len(), if load["load"]["read"] == 50 { 2 } else { 0 }, "{load}");
            let sum: f64 = operations.iter().map(|one| one["iops"]["median"].as_f64().unwrap()).sum();
            let iops = target["iops"]["median"].as_f64().unwrap();
            assert!(operations.is_empty() || (sum - iops).abs() <= iops * 1e-9, "{load}");
        }
        assert!(measured > loads.len() / 2, "{measured} of {}", loads.len());
    }
}

#[test]
fn threads_share_queues_and_verify_data() {
    for program in [Program::Kickless, Program::StorageDaemon] {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk.img");
        fs::File::create_new(&image).unwrap().set_len(8 << 20).unwrap();
        let daemon = serve(program, image.to_str().unwrap());
        for shape in ["--packed=off", "--packed=auto --event-idx=off", "--indirect=off --wait=poll"] {
            let load = "--depth=8 --threads=4 --queues=2 --read=40 --block-size=512,8K --verify --json";
            let results = results(&on(&daemon, &format!("{load} --destroy {shape}")));
            for load in results["loads"].as_array().unwrap() {
                let target = &load["targets"][0];
                let writes = target["operations"][1]["iops"]["median"].as_f64().unwrap();
                let read_back = target["verified"]["read_back"].as_u64().unwrap();
                assert!(writes == 0.0 || read_back > 0, "{target}");
            }
        }
    }
}

#[test]
fn nothing_is_written_without_permission() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("disk.img");
    fs::write(&image, vec![0xa5; 1 << 20]).unwrap();
    let daemon = serve(Program::Kickless, image.to_str().unwrap());
    let socket = daemon.socket().display().to_string();
    let path = format!("--socket-path={socket}");
    let seen = daemon.log().len();
    for arguments in [
        &["blk", &path, "--read=100,0"][..],
        &["blk", &path, "--read=50", "--verify", "--pattern=sequential"],
        &["compare", &socket, &socket, "--read=99"],
    ] {
        let output = bench(arguments);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{said}");
        assert!(said.contains("--destroy"), "{said}");
    }
    // Without the option, the load only reads.
    results(&on(&daemon, "--json"));
    let connected = |line: &str| line.contains("front-end connected").then_some(());
    daemon.log().wait_from(seen, "the reader", Duration::from_secs(30), connected).unwrap();
    drop(daemon);
    assert!(fs::read(&image).unwrap().iter().all(|byte| *byte == 0xa5));
}

#[test]
fn wrong_data_are_found() {
    let daemon = serve(Program::Kickless, "null:1M");
    let said = sentence(&on(&daemon, "--verify --read=50 --destroy"));
    assert!(said.contains("verification failed: byte "), "{said}");
}

#[test]
fn failed_requests_are_reported() {
    let daemon = serve(Program::Kickless, "fault:eio@read:null:1M");
    let output = on(&daemon, "--depth=4");
    let said = sentence(&output);
    assert!(said.contains("requests failed, the first with: I/O error"), "{said}");
    assert!(text(&output.stdout).contains("failed"), "{}", text(&output.stdout));
    parsed(&on(&daemon, "--depth=4 --json"));
}

#[test]
fn impossible_options_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let nobody = format!("--socket-path={}", dir.path().join("nobody.sock").display());
    assert!(sentence(&bench(&["blk", &nobody])).contains("nobody.sock"));
    let daemon = serve(Program::StorageDaemon, "null:1048576");
    for (arguments, named) in [
        ("--queues=5", "4 queues"),
        ("--packed=on", "does not offer"),
        ("--block-size=2M", "less than a block"),
        ("--depth=300 --queue-size=256", "--queue-size=256"),
        ("--pid=4194304", "no process"),
        ("--report=/nonexistent/report.html", "/nonexistent/report.html"),
        ("--range=1048577", "--range=1048577 goes beyond the disk, which has 1048576 bytes (1 MiB)"),
    ] {
        let said = sentence(&on(&daemon, arguments));
        assert!(said.contains(named), "{arguments}: {said}");
    }
}

#[test]
fn a_rate_is_kept_and_late_requests_count() {
    let daemon = serve(Program::Kickless, NULL);
    let results = results(&on(&daemon, "--rate=2000 --time=500ms --json"));
    let target = &results["loads"][0]["targets"][0];
    // 1000 requests are due. Late ones of the time before count too, at most ten.
    let iops = target["iops"]["median"].as_f64().unwrap();
    assert!(iops <= 2030.0, "{iops}");
    // The back-end stops for a time. All requests that become due in this time wait, not only those in
    // flight.
    let child = start(&daemon, "--rate=1000 --depth=1 --time=4s --warm-up=0s --json");
    thread::sleep(Duration::from_millis(500));
    let pid = Pid::from_raw(daemon.pid() as i32).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    thread::sleep(Duration::from_millis(1500));
    kill_process(pid, Signal::CONT).unwrap();
    let results = parsed(&child.wait_with_output().unwrap());
    let latency = &results["loads"][0]["targets"][0]["latency"];
    // A closed loop with one request in flight would have one slow request in some hundreds.
    assert!(latency["p90"].as_u64().unwrap() > 100_000_000, "{latency}");
}

/// A request that is still in flight at the end counts as slow.
#[test]
fn a_stopped_back_end_counts_as_slow() {
    let daemon = serve(Program::Kickless, NULL);
    let pid = Pid::from_raw(daemon.pid() as i32).unwrap();
    for depth in ["1", "1024"] {
        let child = start(&daemon, &format!("--rate=200 --depth={depth} --time=1s --warm-up=0s --json"));
        // The back-end stops after the requests have begun, and continues after the end of the run.
        thread::sleep(Duration::from_millis(500));
        kill_process(pid, Signal::STOP).unwrap();
        thread::sleep(Duration::from_millis(1500));
        kill_process(pid, Signal::CONT).unwrap();
        let results = parsed(&child.wait_with_output().unwrap());
        let target = &results["loads"][0]["targets"][0];
        assert!(target["latency"]["max"].as_u64().unwrap() > 200_000_000, "{target}");
        assert_eq!(target["never_sent"].as_u64().unwrap() > 0, depth == "1", "{target}");
    }
}

/// Asserts that a run was ended by this signal, and that it says so in one sentence.
fn assert_interrupted(output: &Output, signal: Signal) {
    let said = text(&output.stderr);
    assert_eq!(output.status.signal(), Some(signal.as_raw()), "{said}");
    assert!(said.ends_with("interrupted\n") && said.lines().count() == 1, "{said}");
}

#[test]
fn an_interrupt_ends_a_run_on_a_stopped_back_end() {
    let daemon = serve(Program::Kickless, NULL);
    let pid = Pid::from_raw(daemon.pid() as i32).unwrap();
    let child = start(&daemon, "--time=1000s --warm-up=0s --json");
    thread::sleep(Duration::from_millis(500));
    kill_process(pid, Signal::STOP).unwrap();
    thread::sleep(Duration::from_millis(500));
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    kill_process(pid, Signal::CONT).unwrap();
    assert_interrupted(&output, Signal::INT);
    // On a busy machine, the load may not have begun.
    if !output.stdout.is_empty() {
        let results = parsed(&output);
        assert_eq!(results["interrupted"], true);
        assert_eq!(results["loads"][0]["targets"][0]["failed"], 0, "{results}");
    }
}

#[test]
fn an_interrupt_shows_what_there_is() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(Program::Kickless, NULL);
    let report = dir.path().join("report.html");
    let options = format!("--time=1000s --warm-up=0s --report={}", report.display());
    // On a busy machine, the load may not have begun.
    let shown = (0..20).find_map(|_| {
        let child = start(&daemon, &options);
        thread::sleep(Duration::from_millis(200));
        kill_process(Pid::from_raw(child.id() as i32).unwrap(), Signal::TERM).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_interrupted(&output, Signal::TERM);
        Some(text(&output.stdout)).filter(|shown| !shown.is_empty())
    });
    let shown = shown.unwrap();
    assert!(shown.contains("; interrupted after ") && shown.contains("IOPS"), "{shown}");
    assert!(fs::read_to_string(report).unwrap().contains("The run was interrupted"));
}

/// Each load is printed before the next one begins, in lines that fit into a terminal of 80 columns.
#[test]
fn loads_are_printed_as_they_end() {
    let daemon = serve(Program::Kickless, "mem:1M");
    let options = format!("--depth=1,32 --read=50 --destroy --verify --time=300ms --pid={}", daemon.pid());
    // On a busy machine, the second load may have ended before the first one is read.
    let is_early = (0..20).any(|_| {
        let mut child = start(&daemon, &options);
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let mut all = Vec::new();
        while !all.last().is_some_and(|line: &String| line.starts_with("verified: ")) {
            all.push(lines.next().unwrap());
        }
        kill_process(Pid::from_raw(child.id() as i32).unwrap(), Signal::INT).unwrap();
        all.extend(lines);
        assert!(all.iter().all(|line| line.chars().count() <= 80), "{all:#?}");
        for words in ["1 in flight", "all ", "  reads ", "  writes ", "in --json: "] {
            assert!(all.iter().any(|line| line.contains(words)), "{words}: {all:#?}");
        }
        !child.wait().unwrap().success()
    });
    assert!(is_early);
}

#[test]
fn a_card_is_no_disk() {
    let card = Daemon::start_card(&CardConfig::new("null")).unwrap();
    let said = sentence(&on(&card, "--time=1000s"));
    assert!(said.contains("it serves a network card: use bench net or compare-net"), "{said}");
    let socket = card.socket().display().to_string();
    assert!(sentence(&bench(&["compare", &socket, &socket])).contains("bench net"));
}

#[test]
fn targets_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let kickless = kickless_binary().unwrap();
    let ours = format!("{} blk --socket-path={{socket}} --blk-file=null:64M", kickless.display());
    let theirs = "theirs=qemu-storage-daemon --blockdev null-co,node-name=n,size=67108864,read-zeroes=off \
                  --export vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path={socket}";
    let served = serve(Program::Kickless, "mem:64M");
    let report = dir.path().join("report.html");
    let plot = dir.path().join("plot.svg");
    let (report_option, plot_option) =
        (format!("--report={}", report.display()), format!("--plot={}", plot.display()));
    let socket = format!("served={}", served.socket().display());
    let markdown = dir.path().join("table.md");
    let table_option = format!("--markdown={}", markdown.display());
    let load = ["--rounds=3", "--time=20ms", "--warm-up=5ms", "--depth=1,8"];
    let words = ["compare", &ours, theirs, &socket, &ours, &report_option, &plot_option, &table_option];
    let output = bench(&words.into_iter().chain(load).collect::<Vec<_>>());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for word in ["kickless ", "kickless 2 ", "theirs ", "served ", "kickless / this"] {
        assert!(table.contains(word), "{word}: {table}");
    }
    let table = fs::read_to_string(markdown).unwrap();
    assert!(table.starts_with("| random reads of 4 KiB, 1 queue, sleeping | kickless | theirs |"), "{table}");
    assert!(table.contains("\n| 8 in flight | ") && table.lines().count() == 4, "{table}");
    let page = fs::read_to_string(report).unwrap();
    for words in
        ["prefers-color-scheme: dark", "<dt>kernel</dt><dd>Linux ", "<dt>command</dt>", "theirs=qemu"]
    {
        assert!(page.contains(words), "{words}");
    }
    assert!(page.starts_with("<!DOCTYPE html>") && page.matches("<svg").count() == 5, "{page}");
    // The page refers to no other file.
    assert!(!page.contains("src=") && !page.contains("href="), "{page}");
    let plot = fs::read_to_string(plot).unwrap();
    assert!(plot.starts_with("<svg") && plot.contains("prefers-color-scheme: dark"), "{plot}");

    let output = bench(&["compare", "--rounds=3", "--time=20ms", "--json", &ours, theirs]);
    let targets = &results(&output)["loads"][0]["targets"];
    assert_eq!(targets[0]["rounds"].as_array().unwrap().len(), 3);
    assert!(targets[1]["first_to_this"]["median"].as_f64().unwrap() > 0.0);
}

#[test]
fn the_core_to_core_latency_is_measured() {
    let all = sched_getaffinity(None).unwrap();
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect();
    let [driver, back_ends, ..] = cpus[..] else { return };
    let (first, second) = (serve(Program::Kickless, NULL), serve(Program::Kickless, NULL));
    let [first, second] = [&first, &second].map(|daemon| daemon.socket().display().to_string());
    let cpus = [format!("--cpu={driver}"), format!("--target-cpu={back_ends}")];
    let words = ["compare", "--rounds=3", "--time=20ms", "--warm-up=5ms", "--json", &first, &second];
    let output = bench(&words.into_iter().chain(cpus.iter().map(String::as_str)).collect::<Vec<_>>());
    let load = &results(&output)["loads"][0];
    let rounds = load["core_latencies"].as_array().unwrap();
    // Between two turns, one of the CPUs may be busy all the time.
    let is_measured = |one: &Value| one.as_f64().is_some_and(|latency| latency > 0.0);
    let is_one = |one: &Value| one.is_null() || is_measured(one);
    let is_round =
        |round: &Value| round.as_array().is_some_and(|all| all.len() == 3 && all.iter().all(is_one));
    assert!(rounds.len() == 3 && rounds.iter().all(is_round), "{load}");
    assert!(rounds.iter().flat_map(|round| round.as_array().unwrap()).any(is_measured), "{load}");
    assert!(load["repeated_rounds"].as_u64().unwrap() <= 3);
    assert_eq!(load["core_latency_changed"].as_array().unwrap().len(), 3);

    let output = bench(&["core-latency", "--rounds=3", &format!("--cpu={driver},{back_ends}")]);
    let measured = text(&output.stdout);
    assert_eq!(measured.lines().filter(|line| line.ends_with('s') || *line == "not measured").count(), 3);
    for (latencies, said) in [("80ns,99ns,85ns", "same\n"), ("80ns,0.3us", "changed\n")] {
        assert_eq!(text(&bench(&["core-latency", "--same", latencies]).stdout), said);
    }
    let output = bench(&["core-latency", &format!("--cpu={driver},{driver}")]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
}

#[test]
fn a_target_that_does_not_start_is_an_error() {
    let said = sentence(&bench(&["compare", "a=false {socket}", "/b.sock"]));
    assert!(said.contains("exit status: 1"), "{said}");
}

/// The report, and the table of the README, come from this command.
#[test]
fn the_comparison_makes_a_report() {
    let dir = tempfile::tempdir().unwrap();
    let readme = dir.path().join("README.md");
    let (begin, end) = ("<!-- tools/bench --docs writes this table -->\n", "<!-- end of the table -->");
    let text_of = |table: &str| format!("before\n{begin}{table}{end}\nafter\n");
    fs::write(&readme, text_of("an old row\n")).unwrap();
    let committed = fs::read_to_string(repository().join("README.md")).unwrap();
    assert!(committed.contains(begin) && committed.contains(end));
    let output = Command::new(repository().join("tools/bench"))
        .arg("--docs")
        .env("KICKLESS_BENCH_README", &readme)
        .env("KICKLESS_BIN", kickless_binary().unwrap())
        .env("KICKLESS_BENCH_QUICK", "1")
        .env("KICKLESS_BENCH_OUT", dir.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("qemu-storage-daemon"));
    let [report, written] =
        ["report.html", "README.md"].map(|name| fs::read_to_string(dir.path().join(name)).unwrap());
    assert!(report.contains("<code>kickless bench compare ") && dir.path().join("plot.svg").exists());
    let table = &written[written.find(begin).unwrap() + begin.len()..written.find(end).unwrap()];
    assert_eq!(written, text_of(table));
    assert!(table.lines().nth(2).unwrap().starts_with("| 1 in flight, sleeping | "), "{table}");
}

/// The pictures of the documents come from this command.
#[test]
fn the_polling_comparison_draws_its_pictures() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(repository().join("tools/bench-poll"))
        .env("KICKLESS_BIN", kickless_binary().unwrap())
        .args(["--pictures", "--quick"])
        .env("KICKLESS_BENCH_OUT", dir.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    for (name, words) in
        [("rates.svg", ["median latency", "requests a second"]), ("on-off.svg", ["kicks/s", "rate-3s"])]
    {
        let plot = fs::read_to_string(dir.path().join(name)).unwrap();
        assert!(
            plot.len() < 60_000 && words.iter().all(|word| plot.contains(word)),
            "{name}: {}",
            plot.len()
        );
    }
}

#[test]
fn a_load_pauses_periodically() {
    let daemon = serve(Program::Kickless, NULL);
    let pid = format!("--pid={}", daemon.pid());
    for wait in ["sleep", "poll"] {
        let load = format!("--rate=2000,20000 --on-off=20ms,30ms --time=500ms --wait={wait} --json {pid}");
        let results = results(&on(&daemon, &load));
        let loads = results["loads"].as_array().unwrap();
        assert_eq!(loads.len(), 2);
        for (load, rate) in loads.iter().zip([2000.0, 20000.0]) {
            let target = &load["targets"][0];
            // The load runs for two fifths of the time.
            let iops = target["iops"]["median"].as_f64().unwrap();
            assert!(iops > 0.0 && iops <= rate * 0.42, "{iops} of {rate}");
            assert!(target["turns"][0]["back_end_cores"].is_number(), "{target}");
        }
    }
}

#[test]
fn a_run_ends_at_an_interrupt_or_without_its_back_end() {
    let daemon = serve(Program::Kickless, NULL);
    let child = start(&daemon, "--time=1000s");
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), Signal::INT).unwrap();
    assert_interrupted(&child.wait_with_output().unwrap(), Signal::INT);
    // The back-end ends under load.
    let child = start(&daemon, "--time=1000s");
    drop(daemon);
    let said = sentence(&child.wait_with_output().unwrap());
    assert!(said.contains("connection") || said.contains("cannot connect"), "{said}");
}
