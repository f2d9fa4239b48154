//! Address spaces over guest memory that many threads write to, and the order of things by which no write goes unlogged.
//!
//! An [`Mmu`](crate::Mmu) has slots. A [`Space`](crate::Space) maps addresses to them by a radix tree of atomic entries (`tree`), with leaves of 4 KiB, 2 MiB and
//! 1 GiB; in the direct space, which every [`Mmu`](crate::Mmu) has, an address is a guest-physical one. For each piece of a slot there is a list of
//! the entries that map it, the reverse map (`rmap`, `granules`), so that all of them can be protected. A [`Writer`](crate::Writer) is one thread's way in, with
//! a cache of translations (`tlb`) that is emptied at its quiescent points when something has changed (`epoch`).
//! The [crate] is the log, and what its users need to know.
//!
//! # Who does what, in which order
//! By protection ([`Method::Protect`](crate::Method)), where an entry is *writable* only between a first write and the next harvest:
//!
//! | writer, at the first write to a page | harvest |
//! |---|---|
//! | W1: makes the entry writable; it is in its list | H1: takes the dirty bits |
//! | W2: sets the dirty bit, always | H2: walks the lists of those pages, makes the entries read-only |
//! | W3: stores | H3: counts the generation up: a flush |
//! | ... stores again, as long as its cache says writable | H4: waits until each writer has passed a quiescent point |
//! | quiescent point: empties its cache if the generation has changed | H5: hands the bits out |
//!
//! By marks ([`Method::Marks`](crate::Method)), where no entry is ever protected: a writer stores, then looks at the bit, and sets it if it is
//! clear; a harvest is H1, H3, H4 and H5.
//!
//! # Why no write is lost
//! The claim: a store is in a harvest that is handed out after it, and in the next one that begins with a quiescent point of every writer
//! (`H0`, [`harvest_last`](crate::Harvester::harvest_last)) after the store.
//!
//! *The writer that did W1 and W2.* W2 and H1 change the same word atomically, so one comes first. If W2 is first, H1 reads what it
//! wrote (or a later change) with acquire: the harvest has the bit, and W1 and the entry's place in its list are visible to H2. If H1 is first, the bit stays for
//! the next harvest; the entry may stay writable or not, and both are right, for the bit is set. Were W2 before W1, H1 and H2 could come between the
//! two: an entry that is writable, with no bit.
//!
//! *Its later stores, and those of others that found the entry writable* (in the tables or in their cache) set no bit and touch no shared word. They
//! rely on this: whoever finds an entry writable in a section, finds it at a time when its bit is set, or about to be set by a writer
//! between its W1 and W2, or taken by a harvest that has not yet done H2. In the last case the store comes before the writer's
//! next quiescent point, for which H4 waits, so it is done when H5 hands the bit out; and H4 waits *after* H2, so that a translation that was read
//! just before H2 and put into the cache just after it is gone, with the cache, before the section that could use it wrongly. In
//! the middle case the bit is in this harvest or the next; the last harvest begins with H0, by which W2 is done.
//!
//! *By marks*, a writer that sees the bit set does so before H1, or after somebody has set it anew, and then the next harvest has it. In the
//! first case its store may not be visible at H1, in a store buffer for instance; but it is before the writer's next
//! quiescent point, for which H4 waits. Without H4, it would take a full fence between the store and the look. (In one section, a
//! look before the store would do as well.)
//!
//! *A writer that sleeps* between its lookup and its store delays H5 and loses nothing: the dirty page is handed out after it has
//! stored. Who sleeps on purpose is offline, has no lookup left, and empties its cache when it comes back.
//!
//! *A completion of asynchronous input* stores whenever the kernel does, through no entry of ours. What counts is
//! [`Writer::landed`](crate::Writer::landed), which does W1 and W2 for pages that are not writable *now*, whatever they were when the read was submitted.
//!
//! *A split.* Only a writer in W1 splits, by one compare-and-swap from the read-only leaf that it saw to a table of read-only leaves. H2, coming before,
//! finds a leaf that is read-only already; coming after, it goes down to the small leaves. The entry stays in its list all the time, for it is the place
//! in the table above that is listed. A split that meets a removal finds the entry changed and begins again.
//!
//! *Removal* of a mapping, while H2 walks: first the entry is emptied, then it leaves its list, then the wait. A walker that does not find it
//! any more (acquire) comes after it was emptied: H3 makes that visible to each writer before its next section, and stores of the
//! section before are covered by H4. The other way round, H2 could miss an entry that a writer still finds. Other entries of the list are
//! visited, whatever moves (`rmap`).
//!
//! *Breaking up* a mapping of which a part is unmapped puts its pieces into the lists of the level below, and only then takes it out of its own.
//! H2 walks the lists from the largest level down: where it does not find the mapping any more (acquire), it finds the pieces.
//!
//! *A mapping that is added* is in its list before it can be found, and read-only if its slot is logged that way.
//!
//! *Turning the log on* publishes the log, then protects all entries, then waits: a writer that finds an entry protected (acquire) finds the log.
//! *Turning it off* withdraws the log first, whereupon nobody looks at whether entries are writable; makes the entries whole again; waits; and
//! frees the bits and the tables of what was split. Nobody asks for a harvest meanwhile: both take the lock for harvests.
//!
//! *Two harvests at once* take turns. (Each bit would be in one of them only, so without turns no write would be lost, but a user of one could
//! rely on a bit that the other had taken and not yet handed out.)
//!
//! # Who waits for whom
//! Harvests, removals and the log's switch wait for writers: for their quiescent points, and for nothing else. Writers wait for nobody; the locks that they
//! take (a table from the pool) are held for a moment. So a thread must be offline with all its writers when it asks for one of
//! these, or it waits for itself; and when it takes the lock that they hold meanwhile (to add a slot or a mapping, to drop a space, to ask for
//! the overhead). A wait that lasts asks writers to give way, which is the one thing that they sleep for. A writer that is leaked while it is online is
//! waited for, for ever.
//!
//! # What stays allocated
//! A harvest does not announce itself, and can hold the address of an entry or a block of a list that is out of use. Both are
//! type-stable: they may be in use again for something else of their kind, where to make an entry read-only or to read a link does
//! no harm. Tables are freed when a log is turned off, which excludes harvests; blocks with the [`Mmu`](crate::Mmu).
//!
//! # Fences and their partners
//! Release and acquire do, but for one place: who comes online stores that and then looks things up; who waits has changed things and then
//! looks who is online. Each has a sequentially consistent fence in between (`epoch`). `tests/loom.rs` runs the races that it
//! names in every order that the memory model allows, up to a few preemptions.
