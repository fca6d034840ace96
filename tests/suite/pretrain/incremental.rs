//! `checkpoint.incremental` of a run.

use super::*;

const INCREMENTAL: [&str; 2] = ["--set", "checkpoint.incremental=true"];

fn reused(lab: &Lab, run: &str) -> Vec<u64> {
    let saved = lab.events(run).into_iter().filter(|e| e["event"] == "checkpoint_saved");
    saved.map(|e| e["reused_bytes"].as_u64().unwrap()).collect()
}

#[test]
fn a_frozen_router_is_written_once() {
    for lab in Lab::both() {
        for ranks in ["1", "2"] {
            let frozen = ["--set", "router.freeze_tokens=256", "--ranks", ranks];
            let (plain, run) = (format!("plain-{ranks}"), format!("run-{ranks}"));
            lab.run(&plain, &frozen).expect(0);
            lab.run(&run, &[&frozen[..], &INCREMENTAL].concat()).expect(0);
            // Of files cut otherwise, but the same tensors.
            lab.assert_same_state(&plain, &run, 8);
            assert!(reused(&lab, &plain).iter().all(|n| *n == 0));
            let found = reused(&lab, &run);
            // Frozen for the first four of eight steps: the saves of steps 2 to 4 find the routers of step 1.
            assert_eq!(found.len(), 8);
            assert!(found[0] == 0 && found[1..4].iter().all(|n| *n == found[1] && *n > 0), "{found:?}");
            assert!(found[5..].iter().all(|n| *n == 0), "{found:?}");
            assert!(!lab.path(&plain).join("ckpt/objects").exists());
            assert!(lab.path(&run).join("ckpt/objects").exists());
            // Resumed, and no longer incremental: the pool goes on being cleared.
            lab.run(&run, &["--resume", "--set", "train.steps=10", "--set", "checkpoint.keep_last=1"]).expect(0);
            let left = fs::read_dir(lab.path(&run).join("ckpt/objects")).unwrap().count();
            assert!(left <= lab.steps(&run).iter().map(|s| lab.checkpoint(&run, *s).manifest().files.len()).sum(), "{left}");
        }
    }
}
