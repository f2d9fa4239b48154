//! A network card, in C.
#![expect(unsafe_code, reason = "functions that C calls by their names")]

use std::ffi::c_int;
use std::ptr;

use driver::RxMode;

use crate::card_options::CardOptions;
use crate::error::{Fault, guard};
use crate::pointer;

/// Receive mode: take all frames.
pub const KL_RX_PROMISCUOUS: u32 = 0;
/// Receive mode: take all multicast frames.
pub const KL_RX_ALL_MULTICAST: u32 = 1;
/// Receive mode: take all unicast frames.
pub const KL_RX_ALL_UNICAST: u32 = 2;
/// Receive mode: take no multicast frames.
pub const KL_RX_NO_MULTICAST: u32 = 3;
/// Receive mode: take no unicast frames.
pub const KL_RX_NO_UNICAST: u32 = 4;
/// Receive mode: take no broadcast frames.
pub const KL_RX_NO_BROADCAST: u32 = 5;

/// The number of bytes in an Ethernet address.
pub const KL_MAC_SIZE: usize = 6;

/// A virtio-net card behind a vhost-user back-end.
pub struct Card {
    pub(crate) card: driver::Card,
}

/// Connects to the back-end of a card and starts its queues. `*card` is the card, or null on failure.
///
/// Fails as kl_disk_open() does.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_card_open(options: *const CardOptions, card: *mut *mut Card) -> c_int {
    guard(|| {
        // SAFETY: pointers as the crate's documentation requires.
        let options = unsafe {
            pointer::put(card, ptr::null_mut(), "card")?;
            CardOptions::read(options)?
        };
        let opened = Card { card: driver::Card::connect(options)? };
        // SAFETY: as above.
        unsafe { pointer::put(card, pointer::handle(opened), "card")? };
        Ok(0)
    })
}

/// Closes a card. The calls of its pairs fail afterwards. Ignores null.
///
/// Frames in flight may be sent or not; kl_pair_flush() waits for them. The handles of the pairs must still
/// be closed.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_card_close(card: *mut Card) {
    guard(|| {
        // SAFETY: a handle as the crate's documentation requires.
        if let Some(card) = unsafe { pointer::take_back(card)? } {
            card.card.close();
        }
        Ok(())
    });
}

/// Calls `run` with the card.
///
/// # Safety
/// A pointer as the crate's documentation requires.
unsafe fn with_card(card: *mut Card, run: impl FnOnce(&driver::Card) -> Result<c_int, Fault>) -> c_int {
    guard(|| {
        // SAFETY: the caller's promise.
        let card = unsafe { pointer::reference(card, "card")? };
        run(&card.card)
    })
}

/// Returns the number of queue pairs of the card.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_card_pairs(card: *mut Card) -> c_int {
    // SAFETY: a pointer as the crate's documentation requires.
    unsafe {
        with_card(card, |card| {
            c_int::try_from(card.pairs()).map_err(|_| Fault::Overflow("the number of pairs"))
        })
    }
}

/// Returns the MTU of the card. Asks the back-end if it has reported a change.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_card_mtu(card: *mut Card) -> c_int {
    // SAFETY: a pointer as the crate's documentation requires.
    unsafe { with_card(card, |card| Ok(card.mtu()?.into())) }
}

/// Returns 1 if the link of the card is up, otherwise 0. Asks the back-end if it has reported a change.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_card_is_link_up(card: *mut Card) -> c_int {
    // SAFETY: a pointer as the crate's documentation requires.
    unsafe { with_card(card, |card| Ok(card.is_link_up()?.into())) }
}

/// Writes the address of the card to the KL_MAC_SIZE bytes of `mac`. Returns 1, or 0 if the back-end tells no
/// address.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_card_mac(card: *mut Card, mac: *mut u8) -> c_int {
    // SAFETY: pointers as the crate's documentation requires.
    unsafe {
        with_card(card, |card| {
            let Some(address) = card.mac()? else { return Ok(0) };
            pointer::put(mac.cast::<[u8; KL_MAC_SIZE]>(), address, "mac")?;
            Ok(1)
        })
    }
}

/// Sets the address of the card to the KL_MAC_SIZE bytes of `mac`.
///
/// This and the other settings fail with -EOPNOTSUPP if the back-end does not offer them, -EREMOTEIO if it
/// refuses, -ETIMEDOUT if it does not answer, -ECONNRESET if it goes away meanwhile.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_card_set_mac(card: *mut Card, mac: *const u8) -> c_int {
    // SAFETY: pointers as the crate's documentation requires.
    unsafe {
        with_card(card, |card| {
            card.set_mac(*pointer::reference(mac.cast::<[u8; KL_MAC_SIZE]>(), "mac")?)?;
            Ok(0)
        })
    }
}

/// Sets the addresses whose frames the card takes beside its own. Each array has KL_MAC_SIZE bytes for each
/// address.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_card_set_addresses(
    card: *mut Card,
    unicast: *const u8,
    unicast_count: usize,
    multicast: *const u8,
    multicast_count: usize,
) -> c_int {
    // SAFETY: pointers as the crate's documentation requires.
    unsafe {
        with_card(card, |card| {
            let unicast = pointer::array(unicast.cast(), unicast_count, "unicast")?;
            let multicast = pointer::array(multicast.cast(), multicast_count, "multicast")?;
            card.set_addresses(unicast, multicast)?;
            Ok(0)
        })
    }
}

/// Turns a receive mode (KL_RX_...) on (1) or off (0).
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_card_set_rx_mode(card: *mut Card, mode: u32, on: c_int) -> c_int {
    // SAFETY: a pointer as the crate's documentation requires.
    unsafe {
        with_card(card, |card| {
            let mode = match mode {
                KL_RX_PROMISCUOUS => RxMode::Promiscuous,
                KL_RX_ALL_MULTICAST => RxMode::AllMulticast,
                KL_RX_ALL_UNICAST => RxMode::AllUnicast,
                KL_RX_NO_MULTICAST => RxMode::NoMulticast,
                KL_RX_NO_UNICAST => RxMode::NoUnicast,
                KL_RX_NO_BROADCAST => RxMode::NoBroadcast,
                _ => return Err(Fault::Argument("mode is none of KL_RX_...")),
            };
            card.set_rx_mode(mode, on != 0)?;
            Ok(0)
        })
    }
}

/// Tells the card to take the frames of a VLAN (1) or not (0).
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_card_set_vlan(card: *mut Card, vlan: u16, takes: c_int) -> c_int {
    // SAFETY: a pointer as the crate's documentation requires.
    unsafe {
        with_card(card, |card| {
            card.set_vlan(vlan, takes != 0)?;
            Ok(0)
        })
    }
}

/// Tells the card how many pairs to use, from the first on. A new card uses all.
// SAFETY: no other function of this process has the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kl_card_set_pairs(card: *mut Card, pairs: u16) -> c_int {
    // SAFETY: a pointer as the crate's documentation requires.
    unsafe {
        with_card(card, |card| {
            card.set_pairs(pairs)?;
            Ok(0)
        })
    }
}
