//! Files that are no recipes; `--set`.

use zaya::recipe::ScheduleKind;

use super::*;

#[test]
fn files_that_are_none_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, bytes: &[u8]| -> String {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let error = recipe::load(&path, &[]).unwrap_err();
        assert!(error.is::<BadInput>());
        let text = format!("{error:#}");
        assert!(text.contains(name), "{text}");
        text
    };
    assert!(of("latin1.toml", b"[run]\ndir = \"caf\xe9\"\n").contains("not UTF-8 text (line 2, byte 16)"));
    let big = vec![b'#'; (4 << 20) + 1];
    assert!(of("big.toml", &big).contains("larger than 4 MiB"));
    let broken = of("broken.toml", b"[run]\ndir = \"x\n");
    assert!(broken.contains("broken.toml:2:") && broken.contains("not valid TOML"), "{broken}");
    let twice = of("twice.toml", b"[run]\nseed = 1\nseed = 2\n");
    assert!(twice.contains("twice.toml:3:1:") && twice.contains("duplicate key"), "{twice}");
    let twice = of("table.toml", b"[run]\nseed = 1\n[model]\n[run]\n");
    assert!(twice.contains("table.toml:4:") && twice.contains("duplicate key"), "{twice}");
    let overflow = of("float.toml", b"[run]\nseed = 1e999\n");
    assert!(overflow.contains("float.toml:2:8:"), "{overflow}");
    let overflow = of("overflow.toml", b"[run]\nseed = 99999999999999999999\n");
    assert!(overflow.contains("overflow.toml:2:8:"), "{overflow}");
    assert!(of("empty.toml", b"").contains("the key `run.dir` is missing"));
    assert!(of("nul.toml", b"[run]\ndir = \"a\\u0000b\"\n").contains("NUL"));

    let missing = format!("{:#}", recipe::load(&dir.path().join("none.toml"), &[]).unwrap_err());
    assert!(missing.contains("there is no such file") && missing.contains("none.toml"), "{missing}");
    let directory = format!("{:#}", recipe::load(dir.path(), &[]).unwrap_err());
    assert!(directory.contains("it is a directory"), "{directory}");
    // A byte order mark and Windows line ends are no reason to refuse a file.
    let path = dir.path().join("windows.toml");
    std::fs::write(&path, format!("\u{feff}{}", SMALL.replace('\n', "\r\n"))).unwrap();
    recipe::load(&path, &[]).unwrap();
}

/// Whatever is in the file, the answer is a recipe or a sentence for the user.
#[test]
fn damaged_files_never_panic() {
    let mut state = 1u64;
    let mut random = |n: usize| {
        // Knuth's 64-bit linear congruential generator; the upper half is the random one.
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % n
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.toml");
    let text = std::fs::read(root("tests/fixtures/recipe/complete.toml")).unwrap();
    let pieces: [&[u8]; 12] = [b"\n", b"[", b"]]", b"=", b"\"", b"{", b".", b"-", b"\xc3", b"9999999999", b"0.0", b"[stages]\n"];
    let (mut good, mut bad) = (0, 0);
    for _ in 0..900 {
        let mut bytes = text.clone();
        for _ in 0..1 + random(3) {
            let at = random(bytes.len());
            match random(4) {
                0 => bytes[at] = random(256) as u8,
                1 => drop(bytes.splice(at..at, pieces[random(pieces.len())].iter().copied())),
                2 => drop(bytes.drain(at..(at + 1 + random(40)).min(bytes.len()))),
                _ => bytes.truncate(at + 1),
            }
        }
        std::fs::write(&path, &bytes).unwrap();
        match recipe::load(&path, &[]) {
            Ok(_) => good += 1,
            Err(e) => {
                assert!(e.is::<BadInput>(), "{e:#}");
                bad += 1;
            }
        }
    }
    assert!(good > 10 && bad > 100, "{good} {bad}");
}

#[test]
fn set_writes_over_the_file() {
    let r = load(
        SMALL,
        &[
            "train.seq_len = 128",
            "schedule.kind=wsd",
            "schedule.decay_steps=3",
            "run.dir=2026-01-01",
            "data.sources.0.weight=2",
            "data.sources.0.name=17",
            "train.steps=5",
            "train.steps=6",
            "optimizer.adam_betas=[0.5, 0.6]",
            "run.time_limit=2h",
            "model.eos_token_id=none",
            "router.freeze_tokens=4K",
        ],
    )
    .unwrap();
    assert_eq!((r.train.seq_len, r.train.steps), (128, 6));
    assert_eq!((r.schedule.kind, r.schedule.decay_steps), (ScheduleKind::Wsd, 3));
    assert!(r.run.dir.ends_with("2026-01-01"));
    assert_eq!((r.data.sources[0].name.as_str(), r.data.sources[0].weight), ("17", 2.0));
    assert_eq!(r.optimizer.adam_betas, [0.5, 0.6]);
    assert_eq!(r.run.time_limit.unwrap().as_secs(), 7200);
    assert_eq!(r.model.eos_token_id, None);
    assert_eq!(r.router.freeze_tokens, 4000);

    let r = load(SMALL, &["data.sources=[{path = \"a\"}, {path = ['b', 'c'], weight = 0}]"]).unwrap();
    assert_eq!(r.data.sources.len(), 2);
    assert_eq!((r.data.sources[1].shards.len(), r.data.sources[1].weight), (2, 0.0));

    // The one of two keys that exclude each other takes the place of the other in the file.
    assert_eq!(load(SMALL, &["train.tokens=20480"]).unwrap().train.steps, 10);
    let tokens = SMALL.replace("steps = 20", "tokens = \"100K\"");
    assert_eq!(load(&tokens, &[]).unwrap().train.steps, 48);
    assert_eq!(load(&tokens, &["train.steps=7"]).unwrap().train.steps, 7);
}

#[test]
fn set_errors_quote_the_argument() {
    for (set, words) in [
        ("train.seq_lne=5", "did you mean `train.seq_len`"),
        ("seq_len=5", "did you mean `train.seq_len`"),
        ("trian.seq_len=5", "did you mean `train`"),
        ("train.seq_len=abc", "no number of tokens"),
        ("train.seq_len", "expected key.path=value"),
        ("=5", "expected key.path=value"),
        ("train..seq_len=5", "expected key.path=value"),
        ("train.seq_len=", "no value after `=`"),
        ("train.seq_len=[1", "is not a TOML value"),
        ("train.seq_len.x=1", "it is no table"),
        ("data.sources.3.weight=1", "which has 1"),
        ("data.sources.x.weight=1", "which has 1"),
        ("data.sources.0.wieght=1", "did you mean `data.sources.0.weight`"),
        ("data.sources=3", "is an array of tables"),
        ("train=5", "`train` is a table"),
        ("train.seq_len=2048", "max_position_embeddings"),
        ("0=1", "unknown key `0`"),
        ("model.head_dim=10", "an odd number"),
    ] {
        let error = refusal(SMALL, &[set]);
        assert!(error.contains(&format!("--set {set}: ")), "{set}:\n{error}");
        assert!(error.contains(words), "{set}: expected `{words}` in\n{error}");
    }
    let error = refusal(SMALL, &["train.steps=5", "train.tokens=20480"]);
    assert!(error.contains("`train.steps` and `train.tokens` are both given"), "{error}");
}
