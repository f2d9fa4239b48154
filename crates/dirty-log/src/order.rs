//! The order of operations by which no write goes unlogged.
//!
//! # The parts
//! An [`Mmu`](crate::Mmu) has slots. A [`Space`](crate::Space) maps addresses to them. Its map is a radix
//! tree of atomic entries (`tree`), with leaves of 4 KiB, 2 MiB and 1 GiB. Every [`Mmu`](crate::Mmu) has the
//! direct space, in which an address is a guest-physical one.
//!
//! For each piece of a slot there is a list of the entries that map it, the reverse map (`rmap`,
//! `slot_rmap`), so that all of them can be protected. A [`Writer`](crate::Writer) is one thread's access. It
//! has a cache of translations (`tlb`), which is emptied at its quiescent points when something has changed
//! (`epoch`). The [crate] documentation describes the log for its users.
//!
//! # The steps and their order
//! With [`Method::Protect`](crate::Method), an entry is *writable* only between a first write and the next
//! harvest:
//!
//! | writer, at the first write to a page | harvest |
//! |---|---|
//! | W1: makes the entry writable; it is in its list | H1: takes the dirty bits |
//! | W2: sets the dirty bit, always | H2: walks the lists of those pages, makes the entries read-only |
//! | W3: stores | H3: increments the generation: a flush |
//! | ... stores again, as long as its cache says writable | H4: waits until each writer has passed a quiescent point |
//! | quiescent point: empties its cache if the generation has changed | H5: hands the bits out |
//!
//! With [`Method::Marks`](crate::Method), no entry is ever protected. A writer stores, then checks the bit,
//! and sets it if it is clear. A harvest is H1, H3, H4 and H5.
//!
//! # Why no write is lost
//! The claim has two parts. A store is in a harvest that is handed out after it. It is at the latest in the
//! next harvest that begins with a quiescent point of every writer (`H0`,
//! [`harvest_last`](crate::Harvester::harvest_last)) after the store.
//!
//! *The writer that did W1 and W2.* W2 and H1 change the same word atomically, so one of them is first.
//! * If W2 is first, H1 reads its value (or a later one) with acquire. So the harvest has the bit, and H2
//!   sees W1 and the entry in its list.
//! * If H1 is first, the bit stays for the next harvest. The entry may stay writable or not. Both are right,
//!   because the bit is set.
//!
//! If W2 came before W1, H1 and H2 could come between them. The entry would then be writable without a bit.
//!
//! *Later stores of that writer, and stores of others that find the entry writable* in the tables or in their
//! caches. They set no bit and change no shared word. They rely on this: when a section finds an entry
//! writable, one of three things holds.
//! * The bit is set.
//! * A writer between its W1 and W2 is about to set the bit. Then the bit is in this harvest or the next one.
//!   The last harvest begins with H0, after which W2 is done.
//! * A harvest has taken the bit, and has not done H2 yet. Then the store comes before the writer's next
//!   quiescent point, for which H4 waits. So the store is done when H5 hands the bit out.
//!
//! H4 waits *after* H2. A translation can be read just before H2 and cached just after it. The cache is
//! emptied before the next section, which could otherwise use that translation wrongly.
//!
//! *Marks.* A writer sees the bit set either before H1, or after another writer has set it again. In the
//! second case the next harvest has it. In the first case the store may not be visible at H1, because it is
//! in a store buffer, for instance. But it comes before the writer's next quiescent point, for which H4
//! waits. Without H4, a full fence would be needed between the store and the check. (Within one section, a
//! check before the store would work too.)
//!
//! *A writer that is suspended* between its lookup and its store delays H5 and loses nothing. The dirty page
//! is handed out after the store. A thread that sleeps on purpose goes offline. It then has no lookup left,
//! and empties its cache when it comes back.
//!
//! *The completion of an asynchronous read* into guest memory. The kernel stores at any time, through no
//! entry of ours. The step that counts is [`Writer::log_external_write`](crate::Writer::log_external_write).
//! It does W1 and W2 for pages that are not writable *now*, even if they were when the read was submitted.
//!
//! *A split.* Only a writer in W1 splits. One compare-and-swap replaces the read-only leaf that it saw by a
//! table of read-only leaves. An earlier H2 finds a leaf that is already read-only. A later H2 goes down to
//! the small leaves. The list does not change, because it has the place of the entry in the table above. If a
//! removal comes in between, the compare-and-swap fails and the writer starts again.
//!
//! *Removal of a mapping* during H2. First the entry is emptied, then it leaves its list, then comes the
//! wait. If a walker does not find it in the list (acquire), the entry was emptied before. H3 makes that
//! visible to each writer before its next section, and H4 waits for the stores of the section before. In the
//! opposite order, H2 could miss an entry that a writer still finds. The walk visits the other entries of the
//! list, whichever of them move (`rmap`).
//!
//! *Breaking up a mapping*, of which a part is unmapped. Its pieces are first put into the lists of the level
//! below. Only then does the mapping leave its own list. H2 walks the lists from the largest level down. If
//! it does not find the mapping (acquire), it finds the pieces.
//!
//! *A new mapping* is in its list before a writer can find it. It is read-only if its slot is logged by
//! protection.
//!
//! *Turning the log on* publishes the log, then protects all entries, then waits. A writer that finds an
//! entry protected (acquire) finds the log.
//!
//! *Turning the log off* withdraws the log first, so that no writer checks whether entries are writable. Then
//! it joins split entries again, waits, and frees the bits and the tables of split entries. No harvest runs
//! meanwhile, because both take the lock for harvests.
//!
//! *Two harvests at once* take turns. Each bit would be in one of them only, so no write would be lost
//! without turns. But the user of one harvest could rely on a bit that the other has taken and not yet handed
//! out.
//!
//! # Which threads wait
//! Harvests, removals and turning the log on or off wait for quiescent points of writers, and for nothing
//! else. Writers wait for no thread. Their locks (for a table from the pool) are held for a short time.
//!
//! So a thread must take all its writers offline before it requests one of these operations; otherwise it
//! waits for itself. The same holds before it takes the lock that they hold meanwhile: to add a slot or a
//! mapping, to drop a space, or to ask for the overhead. A long wait asks writers to pause, and this is the
//! only reason for which a writer sleeps. If a writer is leaked while it is online, every wait lasts for
//! ever.
//!
//! # Lifetime of tables and blocks
//! A harvest does not announce itself. It may hold the address of an entry, or of a block of a list, that is
//! out of use. Both are type-stable: they can be reused for another object of the same kind. It is harmless
//! to make an entry read-only or to read a link there. Tables are freed when a log is turned off, which
//! excludes harvests. Blocks are freed with the [`Mmu`](crate::Mmu).
//!
//! # Fences and their partners
//! Release and acquire are enough, except in one place. A thread that comes online stores that, and then
//! looks things up. A thread that waits has changed things, and then checks which threads are online. Each of
//! them has a sequentially consistent fence in between (`epoch`). `tests/loom.rs` runs the races that it
//! names in every order that the memory model allows, up to a few preemptions.
