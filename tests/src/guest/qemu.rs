//! Runs guests in QEMU as child processes. Two serial ports carry their output, QMP their commands.
//! Dropping a guest kills it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use tempfile::TempDir;

use crate::daemon::{child_command, wait_for_exit};
use crate::guest::qmp::Qmp;
use crate::guest::{Accel, Assets};
use crate::transcript::Transcript;

/// Time limit for a task on an emulated CPU of a busy host.
pub const LIMIT: Duration = Duration::from_secs(240);

/// The program that the guest boots.
#[derive(Clone, Debug)]
pub enum Boot {
    /// The test kernel, which QEMU loads itself, with further parameters.
    Kernel(String),
    /// SeaBIOS, which boots from the first disk.
    Bios,
    /// OVMF, which boots from the first disk.
    Efi,
}

/// A `vhost-user-blk-pci` device.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// The socket of its back-end.
    pub socket: PathBuf,
    /// Further properties as QEMU writes them, such as `num-queues=1,event_idx=off`; may be empty.
    pub properties: String,
    /// QEMU connects again one second after its back-end has ended.
    pub reconnects: bool,
}

impl DiskConfig {
    /// Returns a disk behind this socket. QEMU asks for one queue per CPU unless the properties say
    /// otherwise.
    pub fn new(socket: &Path, properties: &str) -> DiskConfig {
        DiskConfig { socket: socket.to_owned(), properties: properties.to_owned(), reconnects: false }
    }

    /// Lets QEMU connect again after its back-end has ended.
    pub fn reconnecting(self) -> DiskConfig {
        DiskConfig { reconnects: true, ..self }
    }
}

/// A `virtio-net-pci` device over a `vhost-user` netdev.
#[derive(Clone, Debug)]
pub struct NicConfig {
    /// The socket of its back-end.
    pub socket: PathBuf,
    /// Number of queue pairs. The driver uses as many as the guest has CPUs.
    pub pairs: u16,
    /// Further properties as QEMU writes them, such as `packed=on,host_mtu=9000`; may be empty.
    pub properties: String,
    /// QEMU connects again one second after its back-end has ended.
    pub reconnects: bool,
}

impl NicConfig {
    /// Returns a card behind this socket.
    pub fn new(socket: &Path, pairs: u16, properties: &str) -> NicConfig {
        NicConfig { socket: socket.to_owned(), pairs, properties: properties.to_owned(), reconnects: false }
    }

    /// Lets QEMU connect again after its back-end has ended.
    pub fn reconnecting(self) -> NicConfig {
        NicConfig { reconnects: true, ..self }
    }

    /// Returns the properties of the device, with those that several queues need. Disables the option ROM,
    /// because no test boots from a card.
    fn device(&self, accel: Accel) -> String {
        let vectors = match accel {
            // One vector per queue, one for commands, and one for changes of the configuration.
            Accel::Kvm => 2 * self.pairs + 2,
            // QEMU before 8.0 crashes when a guest without KVM unmasks an MSI-X vector of a vhost-user card.
            Accel::Tcg => 0,
        };
        let mq = if self.pairs > 1 { "on" } else { "off" };
        let more = if self.properties.is_empty() { "" } else { "," };
        format!("romfile=,mq={mq},vectors={vectors}{more}{}", self.properties)
    }
}

/// Options of a virtual machine.
#[derive(Clone, Debug)]
pub struct GuestConfig {
    /// The program that it boots.
    pub boot: Boot,
    /// Number of CPUs.
    pub cpus: u32,
    /// Memory at start in MiB.
    pub memory_mib: u32,
    /// Its disks; the first is `/dev/vda`.
    pub disks: Vec<DiskConfig>,
    /// Its network cards; the first is `eth0`.
    pub nics: Vec<NicConfig>,
    /// Whether a reset boots the guest again. Otherwise a reset ends QEMU.
    pub resets: bool,
    /// Adds an Intel vIOMMU, which the kernel uses strictly: it invalidates each mapping when its buffer is
    /// free again.
    pub viommu: bool,
    /// The initramfs of the test kernel, instead of the one with fio.
    pub initramfs: Option<PathBuf>,
    /// More arguments of QEMU. Disks among them come after the others.
    pub more: Vec<String>,
    /// The socket on which QEMU receives a running machine instead of booting one. QEMU creates it.
    pub incoming: Option<PathBuf>,
}

impl GuestConfig {
    /// Returns a guest with one CPU that boots the test kernel with these parameters.
    pub fn new(parameters: &str, disks: Vec<DiskConfig>) -> GuestConfig {
        GuestConfig {
            boot: Boot::Kernel(parameters.to_owned()),
            cpus: 1,
            memory_mib: 512,
            disks,
            nics: Vec::new(),
            resets: false,
            viommu: false,
            initramfs: None,
            more: Vec::new(),
            incoming: None,
        }
    }

    /// Sets the number of CPUs.
    pub fn cpus(self, cpus: u32) -> GuestConfig {
        GuestConfig { cpus, ..self }
    }

    fn arguments(&self, assets: &Assets, dir: &Path) -> Result<Vec<OsString>> {
        let memory = self.memory_mib;
        let mut words: Vec<OsString> = Vec::new();
        let mut add = |texts: &[&str]| words.extend(texts.iter().map(OsString::from));
        add(&["-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35,memory-backend=mem0"]);
        add(match assets.accel() {
            Accel::Kvm => &["-accel", "kvm", "-cpu", "host"],
            // One thread per CPU, and room for a second CPU. With one thread for all CPUs, or room for one
            // CPU only, QEMU translates guest code without barriers. QEMU up to 8.0 then leaves out an
            // mfence. All versions turn a locked instruction, which is Linux's full barrier on x86, into a
            // load and a store. Then nothing orders the driver's store of an event index before its look at
            // the ring, and the driver loses kicks and calls. With several threads, a booting kernel hangs
            // now and then; `Guest::start` handles that.
            //
            // Without RDRAND, the first reader of random bytes keeps the CPU busy for a second to gather
            // them.
            Accel::Tcg => &["-accel", "tcg,thread=multi", "-cpu", "qemu64,+rdrand"],
        });
        if !self.resets {
            add(&["-no-reboot"]);
        }
        add(&["-smp", &format!("{},maxcpus={}", self.cpus, self.cpus.max(2))]);
        add(&["-m", &format!("{memory}M,slots=4,maxmem={}M", memory + 4096)]);
        add(&["-object", &format!("memory-backend-memfd,id=mem0,size={memory}M,share=on")]);
        // The first port is the console, the second carries the results.
        add(&["-serial", "stdio"]);
        let path = |name: &str| dir.join(name).display().to_string();
        add(&["-chardev", &format!("socket,id=results,path={}", path("results"))]);
        add(&["-serial", "chardev:results"]);
        add(&[
            "-chardev",
            &format!("socket,id=qmp,path={}", path("qmp")),
            "-mon",
            "chardev=qmp,mode=control",
        ]);
        if self.viommu {
            // The vIOMMU must come before the devices behind it.
            add(&["-device", "intel-iommu,device-iotlb=on"]);
        }
        add(&["-device", "pcie-root-port,id=port0,chassis=1,slot=1"]);
        match &self.boot {
            Boot::Kernel(parameters) => {
                // On a busy host, the ticks of an emulated timer come so late that Linux takes the timer
                // for broken and panics.
                let viommu = if self.viommu { "intel_iommu=on iommu.strict=1" } else { "" };
                // The kernel's tests of its ciphers would take a seventh of an emulated boot.
                let parameters = format!(
                    "console=ttyS0 quiet loglevel=5 panic=-1 no_timer_check cryptomgr.notests=1 {viommu} {parameters}"
                );
                add(&["-kernel", &assets.kernel().display().to_string()]);
                let initramfs = self.initramfs.clone().unwrap_or_else(|| assets.tools());
                add(&["-initrd", &initramfs.display().to_string(), "-append", &parameters]);
            }
            Boot::Bios => {}
            Boot::Efi => {
                const FIRMWARE: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
                let variables = dir.join("efi-variables.fd");
                fs::copy("/usr/share/OVMF/OVMF_VARS_4M.fd", &variables)?;
                add(&["-drive", &format!("if=pflash,unit=0,format=raw,readonly=on,file={FIRMWARE}")]);
                add(&["-drive", &format!("if=pflash,unit=1,format=raw,file={}", variables.display())]);
            }
        }
        if let Some(path) = &self.incoming {
            add(&["-incoming", &format!("unix:{}", path.display())]);
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let reconnect = if disk.reconnects { ",reconnect=1" } else { "" };
            add(&["-chardev", &format!("socket,id=chr{index},path={}{reconnect}", disk.socket.display())]);
            let mut device = format!("vhost-user-blk-pci,id=disk{index},chardev=chr{index}");
            if !matches!(self.boot, Boot::Kernel(_)) {
                device += &format!(",bootindex={index}");
            }
            if !disk.properties.is_empty() {
                device = format!("{device},{}", disk.properties);
            }
            add(&["-device", &device]);
        }
        for (index, nic) in self.nics.iter().enumerate() {
            let reconnect = if nic.reconnects { ",reconnect=1" } else { "" };
            add(&["-chardev", &format!("socket,id=nic{index},path={}{reconnect}", nic.socket.display())]);
            let netdev = format!("vhost-user,id=net{index},chardev=nic{index},queues={}", nic.pairs);
            add(&["-netdev", &netdev]);
            add(&[
                "-device",
                &format!("virtio-net-pci,id=card{index},netdev=net{index},{}", nic.device(assets.accel())),
            ]);
        }
        words.extend(self.more.iter().map(OsString::from));
        Ok(words)
    }
}

/// The `KEY=VALUE` lines that a guest reported on its second serial port.
pub type Results = BTreeMap<String, String>;

/// A running guest. Dropping it kills QEMU.
pub struct Guest {
    child: Child,
    console: Transcript,
    results: Transcript,
    /// The host's end of the second serial port, for writing.
    to_guest: UnixStream,
    messages: Transcript,
    qmp: Qmp,
    _dir: TempDir,
}

impl Guest {
    /// Starts QEMU. Waits until a test kernel has booted. Does not wait for firmware or for a machine that
    /// QEMU receives.
    ///
    /// In about one boot of a thousand, the kernel hangs on an emulated machine with several CPUs: a CPU is
    /// stuck before the kernel has a driver for any disk. This method then starts the machine again and
    /// prints a message.
    ///
    /// # Errors
    /// QEMU does not start; the message has its output.
    pub fn start(config: &GuestConfig) -> Result<Guest> {
        const ATTEMPTS: u32 = 3;
        for _ in 1..ATTEMPTS {
            let guest = Guest::launch(config)?;
            if config.incoming.is_some() || !matches!(config.boot, Boot::Kernel(_)) || guest.boots() {
                return Ok(guest);
            }
            eprintln!(
                "the kernel hung before it had a disk; starting the guest again\n{}",
                guest.last_words()
            );
        }
        Guest::launch(config)
    }

    /// Waits for the guest's first task. Returns `false` if the kernel reports that a CPU is stuck. Callers
    /// notice all other failures when they wait for the guest's results.
    fn boots(&self) -> bool {
        let deadline = Instant::now() + LIMIT;
        let mut line = 0;
        while Instant::now() < deadline {
            match self.results.line(0, Instant::now() + Duration::from_millis(200)) {
                Ok(_) => return true,
                Err(_) => {
                    let console = self.console.lines();
                    if console[line..].iter().any(|line| line.contains("soft lockup")) {
                        return false;
                    }
                    line = console.len();
                }
            }
        }
        true
    }

    fn launch(config: &GuestConfig) -> Result<Guest> {
        let assets = Assets::get()?;
        let dir = tempfile::Builder::new().prefix("kickless-").tempdir()?;
        let results = UnixListener::bind(dir.path().join("results"))?;
        let qmp = UnixListener::bind(dir.path().join("qmp"))?;
        let words = config.arguments(assets, dir.path())?;
        let mut child = child_command("qemu-system-x86_64")
            .args(&words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot run QEMU")?;
        let console = Transcript::of("console", child.stdout.take().context("no pipe")?);
        let messages = Transcript::of("QEMU", child.stderr.take().context("no pipe")?);
        let connected = (|| {
            let port = accept(&results, &mut child)?;
            let results = Transcript::of("results", port.try_clone()?);
            anyhow::Ok((results, port, Qmp::new(accept(&qmp, &mut child)?)?))
        })();
        match connected {
            Ok((results, to_guest, qmp)) => {
                Ok(Guest { child, console, results, to_guest, messages, qmp, _dir: dir })
            }
            Err(error) => {
                child.kill()?;
                child.wait()?;
                let lines = messages.wait_for_end(LIMIT)?.join("\n");
                Err(error.context(format!("QEMU does not start: {lines}")))
            }
        }
    }

    /// Returns the output of the kernel and the firmware.
    pub fn console(&self) -> &Transcript {
        &self.console
    }

    /// Returns the lines of the second serial port.
    pub fn results(&self) -> &Transcript {
        &self.results
    }

    /// Writes a line to the guest's second serial port.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        Ok(self.to_guest.write_all(format!("{line}\n").as_bytes())?)
    }

    /// Returns whether QEMU still runs.
    ///
    /// # Errors
    /// The status of the process cannot be read.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Returns QEMU's monitor.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }

    /// Waits until the guest has reported exactly `report`, such as `writes=flowing`.
    ///
    /// # Errors
    /// The guest fails, ends, or does not report it in time.
    pub fn wait_for(&self, report: &str) -> Result<()> {
        self.results.wait_for(report, LIMIT, |line| {
            let found = line.strip_prefix("KL: ")?;
            if found == "end=failed" {
                return Some(Err(anyhow::anyhow!("the guest failed before {report}")));
            }
            (found == report).then_some(Ok(()))
        })?
    }

    /// Waits until the guest has completed its tasks and powered off. Returns its results.
    ///
    /// # Errors
    /// A task failed, the guest ended in another way, or it did not end in time.
    pub fn finish(mut self) -> Result<Results> {
        let ended = self
            .results
            .wait_for("the end of its tasks", LIMIT, |line| line.strip_prefix("KL: end=").map(str::to_owned));
        let results: Results = self
            .results
            .lines()
            .iter()
            .filter_map(|line| line.strip_prefix("KL: ")?.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.trim().to_owned()))
            .collect();
        match ended.as_deref() {
            Ok("ok") => {}
            Ok(_) => {
                // The last messages of the kernel follow on the console until QEMU ends.
                let _ = wait_for_exit(&mut self.child, LIMIT);
                let reason = results.get("fail").map_or("no reason given", String::as_str);
                bail!("the guest failed: {reason}\n{}", self.last_words());
            }
            Err(error) => bail!("{error:#}\n{}{}", self.cpus_state(), self.last_words()),
        }
        let status = wait_for_exit(&mut self.child, LIMIT).context("powering off")?;
        ensure!(status.success(), "QEMU ended, {status}\n{}", self.last_words());
        Ok(results)
    }

    /// Returns the registers of each CPU, for the report of a guest that hangs.
    fn cpus_state(&mut self) -> String {
        let registers = json!({ "command-line": "info registers -a" });
        let text = self.qmp.execute("human-monitor-command", registers);
        let text = text.ok().and_then(|text| text.as_str().map(str::to_owned)).unwrap_or_default();
        let telling = |line: &&str| line.starts_with("CPU#") || line.contains("RIP=");
        text.lines().filter(telling).map(|line| format!("{line}\n")).collect()
    }

    /// Kills QEMU with SIGKILL, like a crash.
    ///
    /// # Errors
    /// QEMU cannot be killed.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Resets the machine like its reset button.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn reset(&mut self) -> Result<()> {
        self.qmp.execute("system_reset", json!({}))?;
        Ok(())
    }

    /// Plugs a disk into the root port that is free in every guest.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn add_disk(&mut self, id: &str, disk: &DiskConfig) -> Result<()> {
        self.add_chardev(id, &disk.socket)?;
        let mut device = json!({ "driver": "vhost-user-blk-pci", "id": id, "chardev": format!("chr-{id}"), "bus": "port0" });
        set_properties(&mut device, &disk.properties);
        self.qmp.execute("device_add", device)?;
        Ok(())
    }

    /// Unplugs such a disk: asks the guest and waits until the guest has released it.
    ///
    /// # Errors
    /// QEMU refuses, or the guest does not release it in time.
    pub fn remove_disk(&mut self, id: &str) -> Result<()> {
        self.unplug(id)?;
        self.qmp.execute("chardev-remove", json!({ "id": format!("chr-{id}") }))?;
        Ok(())
    }

    /// Plugs a network card into the root port that is free in every guest.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn add_nic(&mut self, id: &str, nic: &NicConfig) -> Result<()> {
        self.add_chardev(id, &nic.socket)?;
        let netdev = json!({ "type": "vhost-user", "id": format!("net-{id}"), "chardev": format!("chr-{id}"), "queues": nic.pairs });
        self.qmp.execute("netdev_add", netdev)?;
        let mut device =
            json!({ "driver": "virtio-net-pci", "id": id, "netdev": format!("net-{id}"), "bus": "port0" });
        set_properties(&mut device, &nic.device(Assets::get()?.accel()));
        self.qmp.execute("device_add", device)?;
        Ok(())
    }

    /// Unplugs such a card: asks the guest and waits until the guest has released it.
    ///
    /// # Errors
    /// QEMU refuses, or the guest does not release it in time.
    pub fn remove_nic(&mut self, id: &str) -> Result<()> {
        self.unplug(id)?;
        // Removing the netdev closes its socket.
        self.qmp.execute("netdev_del", json!({ "id": format!("net-{id}") }))?;
        Ok(())
    }

    /// Connects a character device to a back-end's socket.
    fn add_chardev(&mut self, id: &str, socket: &Path) -> Result<()> {
        let address = json!({ "type": "unix", "data": { "path": socket } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        self.qmp.execute("chardev-add", json!({ "id": format!("chr-{id}"), "backend": backend }))?;
        Ok(())
    }

    fn unplug(&mut self, id: &str) -> Result<()> {
        let mark = self.qmp.mark();
        self.qmp.execute("device_del", json!({ "id": id }))?;
        self.qmp.event(mark, "DEVICE_DELETED", |data| data["device"] == id)?;
        Ok(())
    }

    /// Plugs a DIMM of `mib` MiB.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn add_memory(&mut self, id: &str, mib: u64) -> Result<()> {
        let backend = format!("mem-{id}");
        self.qmp.execute(
            "object-add",
            json!({ "qom-type": "memory-backend-memfd", "id": backend, "size": mib << 20, "share": true }),
        )?;
        self.qmp.execute("device_add", json!({ "driver": "pc-dimm", "id": id, "memdev": backend }))?;
        Ok(())
    }

    /// Returns the last lines from QEMU, the guest's tasks and its console, for the message of a failed
    /// test.
    pub fn last_words(&self) -> String {
        const SHOWN: usize = 60;
        let mut text = String::new();
        for transcript in [&self.messages, &self.results, &self.console] {
            let lines = transcript.lines();
            text += &lines[lines.len().saturating_sub(SHOWN)..].join("\n");
            text.push('\n');
        }
        text
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // An error means that QEMU has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("{}", self.last_words());
        }
    }
}

/// Adds properties in QEMU's notation to a device in JSON.
fn set_properties(device: &mut serde_json::Value, properties: &str) {
    for (key, value) in properties.split(',').filter_map(|text| text.split_once('=')) {
        // QMP expects numbers and switches as such, not as strings.
        device[key] = match (value, value.parse::<u64>()) {
            ("on" | "off", _) => json!(value == "on"),
            (_, Ok(number)) => json!(number),
            (text, Err(_)) => json!(text),
        };
    }
}

/// Accepts QEMU's connection. Fails as soon as QEMU has ended.
fn accept(listener: &UnixListener, child: &mut Child) -> Result<UnixStream> {
    const LIMIT: Duration = Duration::from_secs(60);
    let deadline = Instant::now() + LIMIT;
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        if let Some(status) = child.try_wait()? {
            bail!("it ended, {status}");
        }
        ensure!(Instant::now() < deadline, "QEMU does not connect");
        thread::sleep(Duration::from_millis(5));
    }
}
