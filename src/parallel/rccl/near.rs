//! The processors next to a device: where the system says which these are, a rank's threads stay on them, and so does its memory.

use std::fs;
use std::mem::{size_of_val, zeroed};

/// Binds the calling thread, and those that it starts from now on, to the processors of the NUMA node that the device at this PCI address
/// hangs on. Does nothing where the system does not tell, or where none of them is allowed to this process; returns how many they are then.
pub fn bind_near(pci_address: &str) -> Option<usize> {
    let path = format!("/sys/bus/pci/devices/{}/local_cpulist", pci_address.to_lowercase());
    bind_to(&processors(fs::read_to_string(path).ok()?.trim())?)
}

/// Numbers of a list such as `0-3,8,10-11`.
fn processors(list: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in list.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    (!all.is_empty()).then_some(all)
}

fn bind_to(processors: &[usize]) -> Option<usize> {
    // SAFETY: a set of bits, for which all zero is a value.
    let (mut allowed, mut wanted): (libc::cpu_set_t, libc::cpu_set_t) = unsafe { (zeroed(), zeroed()) };
    // SAFETY: the calling thread (0), and a place of that size.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&allowed), &mut allowed) } != 0 {
        return None;
    }
    let mut count = 0;
    for p in processors.iter().copied().filter(|p| *p < libc::CPU_SETSIZE as usize) {
        // SAFETY: within the set, as was just checked.
        if unsafe { libc::CPU_ISSET(p, &allowed) } {
            // SAFETY: as above.
            unsafe { libc::CPU_SET(p, &mut wanted) };
            count += 1;
        }
    }
    // SAFETY: as above; a set that is not empty.
    (count > 0 && unsafe { libc::sched_setaffinity(0, size_of_val(&wanted), &wanted) } == 0).then_some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_read() {
        assert_eq!(processors("0-3,8,10-11"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(processors(""), None);
        assert_eq!(processors("0-x"), None);
    }

    #[test]
    fn a_thread_is_bound_to_what_it_may_use() {
        std::thread::spawn(|| {
            // SAFETY: takes nothing.
            let here = unsafe { libc::sched_getcpu() } as usize;
            assert_eq!(bind_to(&[here]), Some(1));
            // What it may not use any more.
            assert_eq!(bind_to(&[here + 1]), None);
        })
        .join()
        .unwrap();
        assert_eq!(bind_near("ffff:ff:1f.7"), None);
    }
}
