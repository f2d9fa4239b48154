//! Guests in QEMU as child processes: started, watched over two serial ports, commanded over QMP, killed when dropped.

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

use crate::daemon::{dying_with_us, wait_for_exit};
use crate::guest::qmp::Qmp;
use crate::guest::{Accel, Assets};
use crate::transcript::Transcript;

/// Safety net for a whole task on an emulated CPU that shares its host.
pub const LIMIT: Duration = Duration::from_secs(240);

/// What the guest boots.
#[derive(Clone, Debug)]
pub enum Boot {
    /// The test kernel straight from QEMU; the text is added to its command line.
    Kernel(String),
    /// SeaBIOS, which boots from the first disk.
    Bios,
    /// OVMF, which boots from the first disk.
    Efi,
}

/// A `vhost-user-blk-pci` device.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// Where its back-end listens.
    pub socket: PathBuf,
    /// Further properties as QEMU writes them, such as `num-queues=1,event_idx=off`; may be empty.
    pub properties: String,
    /// QEMU connects again, a second after its back-end has gone.
    pub reconnects: bool,
}

impl DiskConfig {
    /// A disk behind this socket; QEMU asks for one queue for each CPU unless the properties say otherwise.
    pub fn new(socket: &Path, properties: &str) -> DiskConfig {
        DiskConfig { socket: socket.to_owned(), properties: properties.to_owned(), reconnects: false }
    }

    /// The same of which QEMU minds no end of its back-end.
    pub fn reconnecting(self) -> DiskConfig {
        DiskConfig { reconnects: true, ..self }
    }
}

/// A `virtio-net-pci` device over a `vhost-user` netdev.
#[derive(Clone, Debug)]
pub struct NicConfig {
    /// The socket of its back-end.
    pub socket: PathBuf,
    /// Pairs of queues; the driver uses several if there are as many CPUs.
    pub pairs: u16,
    /// Further properties as QEMU writes them, such as `packed=on,host_mtu=9000`; may be empty.
    pub properties: String,
    /// QEMU connects again, a second after its back-end has gone.
    pub reconnects: bool,
}

impl NicConfig {
    /// A card behind this socket.
    pub fn new(socket: &Path, pairs: u16, properties: &str) -> NicConfig {
        NicConfig { socket: socket.to_owned(), pairs, properties: properties.to_owned(), reconnects: false }
    }

    /// The same of which QEMU minds no end of its back-end.
    pub fn reconnecting(self) -> NicConfig {
        NicConfig { reconnects: true, ..self }
    }

    /// The properties of the device, with those that several queues need. Without the option ROM, from which no test boots.
    fn device(&self, accel: Accel) -> String {
        let vectors = match accel {
            // An interrupt for each queue, one for commands, and one for changes of the configuration.
            Accel::Kvm => 2 * self.pairs + 2,
            // QEMU before 8.0 crashes when a guest without KVM unmasks an MSI-X vector of a vhost-user card.
            Accel::Tcg => 0,
        };
        let mq = if self.pairs > 1 { "on" } else { "off" };
        let more = if self.properties.is_empty() { "" } else { "," };
        format!("romfile=,mq={mq},vectors={vectors}{more}{}", self.properties)
    }
}

/// A virtual machine.
#[derive(Clone, Debug)]
pub struct GuestConfig {
    /// What it boots.
    pub boot: Boot,
    /// CPUs.
    pub cpus: u32,
    /// Memory at start in MiB.
    pub memory_mib: u32,
    /// Its disks; the first is `/dev/vda`.
    pub disks: Vec<DiskConfig>,
    /// Its network cards; the first is `eth0`.
    pub nics: Vec<NicConfig>,
    /// Whether a reset starts the guest anew; it ends QEMU otherwise.
    pub resets: bool,
    /// Whether it has a vIOMMU (Intel's), which the kernel uses strictly: each mapping is invalidated when its buffer is given
    /// back.
    pub viommu: bool,
    /// Where a running machine is received instead of booting one: a socket that QEMU makes.
    pub incoming: Option<PathBuf>,
}

impl GuestConfig {
    /// A guest that boots the test kernel with these parameters and has one CPU.
    pub fn new(parameters: &str, disks: Vec<DiskConfig>) -> GuestConfig {
        GuestConfig {
            boot: Boot::Kernel(parameters.to_owned()),
            cpus: 1,
            memory_mib: 512,
            disks,
            nics: Vec::new(),
            resets: false,
            viommu: false,
            incoming: None,
        }
    }

    /// The same with this many CPUs.
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
            // A thread for each CPU, and a second CPU that there could be: where all CPUs are in one thread, or there can only be
            // one, QEMU translates guest code as if nobody ran beside it. Then an mfence is left out (up to QEMU 8.0), and a
            // locked instruction, which is Linux's full barrier on x86, becomes a load and a store (later versions too). So a
            // driver loses kicks and calls: nothing is between its store of an event index and its look at the ring. What
            // several threads do to a booting kernel now and then is seen to below.
            Accel::Tcg => &["-accel", "tcg,thread=multi"],
        });
        if !self.resets {
            add(&["-no-reboot"]);
        }
        add(&["-smp", &format!("{},maxcpus={}", self.cpus, self.cpus.max(2))]);
        add(&["-m", &format!("{memory}M,slots=4,maxmem={}M", memory + 4096)]);
        add(&["-object", &format!("memory-backend-memfd,id=mem0,size={memory}M,share=on")]);
        // The first port is the console, the second takes the results.
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
            // Before the devices behind it.
            add(&["-device", "intel-iommu,device-iotlb=on"]);
        }
        add(&["-device", "pcie-root-port,id=port0,chassis=1,slot=1"]);
        match &self.boot {
            Boot::Kernel(parameters) => {
                // Where the host is busy, ticks of an emulated timer come so late that Linux takes it for broken, and gives up.
                let viommu = if self.viommu { "intel_iommu=on iommu.strict=1" } else { "" };
                let parameters =
                    format!("console=ttyS0 quiet loglevel=5 panic=-1 no_timer_check {viommu} {parameters}");
                add(&["-kernel", &assets.kernel().display().to_string()]);
                add(&["-initrd", &assets.tools().display().to_string(), "-append", &parameters]);
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
        Ok(words)
    }
}

/// What a guest reported: the `KEY=VALUE` lines of its second serial port.
pub type Results = BTreeMap<String, String>;

/// A running guest; killed when dropped.
pub struct Guest {
    child: Child,
    console: Transcript,
    results: Transcript,
    /// The other direction of the second serial port.
    to_guest: UnixStream,
    messages: Transcript,
    qmp: Qmp,
    _dir: TempDir,
}

impl Guest {
    /// Starts QEMU, and waits until a test kernel has booted; firmware boots while this returns, and a machine that is to be received
    /// has yet to come.
    ///
    /// On an emulated machine of several CPUs that kernel has been seen to hang, in one boot of a thousand or so, with a CPU
    /// stuck before it had a driver for any disk. Such a machine is started anew, and says so.
    ///
    /// # Errors
    /// QEMU does not start; what it says about it is in the message.
    pub fn start(config: &GuestConfig) -> Result<Guest> {
        const ATTEMPTS: u32 = 3;
        for _ in 1..ATTEMPTS {
            let guest = Guest::launch(config)?;
            if config.incoming.is_some() || !matches!(config.boot, Boot::Kernel(_)) || guest.boots() {
                return Ok(guest);
            }
            eprintln!("the kernel hung before it had a disk; started anew\n{}", guest.last_words());
        }
        Guest::launch(config)
    }

    /// Whether the guest comes to its first task; `false`: its kernel says that a CPU is stuck. Whatever else happens is for those
    /// to find who wait for its results.
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
        let mut child = dying_with_us("qemu-system-x86_64")
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
                let lines = messages.whole(LIMIT)?.join("\n");
                Err(error.context(format!("QEMU does not start: {lines}")))
            }
        }
    }

    /// What the kernel and the firmware print.
    pub fn console(&self) -> &Transcript {
        &self.console
    }

    /// The lines of the second serial port, as they come.
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

    /// Whether QEMU runs still.
    ///
    /// # Errors
    /// The process cannot be asked for.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// QEMU's monitor.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }

    /// Waits until the guest has reported exactly this, such as `writes=flowing`.
    ///
    /// # Errors
    /// It fails or ends before, or does not get there in time.
    pub fn wait_for(&self, report: &str) -> Result<()> {
        self.results.wait_for(report, LIMIT, |line| {
            let found = line.strip_prefix("KL: ")?;
            if found == "end=failed" {
                return Some(Err(anyhow::anyhow!("the guest failed before {report}")));
            }
            (found == report).then_some(Ok(()))
        })?
    }

    /// Waits until the guest has done its tasks and powered off, and gives its results.
    ///
    /// # Errors
    /// A task failed, or the guest ended otherwise or not in time.
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
                // The kernel's last words follow on the console, until QEMU ends.
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

    /// Where each CPU is: for a guest that hangs.
    fn cpus_state(&mut self) -> String {
        let registers = json!({ "command-line": "info registers -a" });
        let text = self.qmp.execute("human-monitor-command", registers);
        let text = text.ok().and_then(|text| text.as_str().map(str::to_owned)).unwrap_or_default();
        let telling = |line: &&str| line.starts_with("CPU#") || line.contains("RIP=");
        text.lines().filter(telling).map(|line| format!("{line}\n")).collect()
    }

    /// Kills QEMU as a crash would, with no warning to anybody.
    ///
    /// # Errors
    /// It cannot be killed.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Resets the machine, as its reset button would.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn reset(&mut self) -> Result<()> {
        self.qmp.execute("system_reset", json!({}))?;
        Ok(())
    }

    /// Plugs a disk into the root port that every guest has free.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn add_disk(&mut self, id: &str, disk: &DiskConfig) -> Result<()> {
        let address = json!({ "type": "unix", "data": { "path": disk.socket } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        self.qmp.execute("chardev-add", json!({ "id": format!("chr-{id}"), "backend": backend }))?;
        let mut device = json!({ "driver": "vhost-user-blk-pci", "id": id, "chardev": format!("chr-{id}"), "bus": "port0" });
        set_properties(&mut device, &disk.properties);
        self.qmp.execute("device_add", device)?;
        Ok(())
    }

    /// Unplugs such a disk: asks the guest for it and waits until it has let go.
    ///
    /// # Errors
    /// QEMU refuses, or the guest does not let go in time.
    pub fn remove_disk(&mut self, id: &str) -> Result<()> {
        self.unplug(id)?;
        self.qmp.execute("chardev-remove", json!({ "id": format!("chr-{id}") }))?;
        Ok(())
    }

    /// Plugs a network card into the root port that every guest has free.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn add_nic(&mut self, id: &str, nic: &NicConfig) -> Result<()> {
        let address = json!({ "type": "unix", "data": { "path": nic.socket } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false } });
        self.qmp.execute("chardev-add", json!({ "id": format!("chr-{id}"), "backend": backend }))?;
        let netdev = json!({ "type": "vhost-user", "id": format!("net-{id}"), "chardev": format!("chr-{id}"), "queues": nic.pairs });
        self.qmp.execute("netdev_add", netdev)?;
        let mut device =
            json!({ "driver": "virtio-net-pci", "id": id, "netdev": format!("net-{id}"), "bus": "port0" });
        set_properties(&mut device, &nic.device(Assets::get()?.accel()));
        self.qmp.execute("device_add", device)?;
        Ok(())
    }

    /// Unplugs such a card: asks the guest for it and waits until it has let go.
    ///
    /// # Errors
    /// QEMU refuses, or the guest does not let go in time.
    pub fn remove_nic(&mut self, id: &str) -> Result<()> {
        self.unplug(id)?;
        // The socket goes with it.
        self.qmp.execute("netdev_del", json!({ "id": format!("net-{id}") }))?;
        Ok(())
    }

    fn unplug(&mut self, id: &str) -> Result<()> {
        let mark = self.qmp.mark();
        self.qmp.execute("device_del", json!({ "id": id }))?;
        self.qmp.event(mark, "DEVICE_DELETED", |data| data["device"] == id)?;
        Ok(())
    }

    /// Plugs a DIMM of this size in MiB.
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

    /// What QEMU, the guest's tasks and its console printed last: what a failure leaves for its reader.
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
        // It may have ended already; there is nobody to tell.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("{}", self.last_words());
        }
    }
}

/// Adds properties, as QEMU writes them, to a device in JSON.
fn set_properties(device: &mut serde_json::Value, properties: &str) {
    for (key, value) in properties.split(',').filter_map(|text| text.split_once('=')) {
        // Numbers must come as numbers, and switches as such.
        device[key] = match (value, value.parse::<u64>()) {
            ("on" | "off", _) => json!(value == "on"),
            (_, Ok(number)) => json!(number),
            (text, Err(_)) => json!(text),
        };
    }
}

/// Waits for QEMU's connection as long as QEMU lives.
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
        ensure!(Instant::now() < deadline, "it does not connect");
        thread::sleep(Duration::from_millis(5));
    }
}
