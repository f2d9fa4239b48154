//! Memory of the tables of a guest of 1 TiB that is nearly empty.

use crate::contestants::{PAGE, file, slot};
use kickless_dirty_log::{Harvester, Method, Mmu, Writer};
use kickless_memory::{Gpa, Iova};

const GUEST: u64 = 1 << 40;
const BLOCK: u64 = 2 << 20;

pub(crate) fn run() {
    println!("memory for the tables of a guest of 1 TiB");
    let memory = file(GUEST);
    let off = {
        let mmu = Mmu::new();
        mmu.add(slot(&memory, GUEST)).unwrap();
        mmu.overhead()
    };
    println!("  log off: {:.1} KiB (to be under 1024)", off as f64 / 1024.0);
    for (method, name) in [(Method::Protect, "Protect"), (Method::Marks, "Marks")] {
        for (blocks, apart, title) in [
            (2048, 1, "side by side"),
            (2048, 8, "one of 8"),
            (2048, 64, "one of 64"),
            (1024, 512, "one of 512"),
        ] {
            let mmu = Mmu::new();
            mmu.add(slot(&memory, GUEST)).unwrap();
            let log = Harvester::enable(&mmu, Gpa(0), method).unwrap();
            let mut writer = Writer::direct(&mmu);
            for block in 0..blocks {
                writer.write_obj(Iova(block * apart * BLOCK + block % 512 * PAGE), &0_u64).unwrap();
            }
            let took = mmu.overhead() - off;
            println!(
                "  {name:<8} {blocks} blocks of 2 MiB written to, {title:<13} {:>8.1} KiB, {:.3} % of them (to be under 0.5)",
                took as f64 / 1024.0,
                took as f64 / (blocks * BLOCK) as f64 * 100.0
            );
            drop(writer);
            log.disable();
            assert!(mmu.overhead() <= off + 4096, "tables are left");
        }
    }
}
