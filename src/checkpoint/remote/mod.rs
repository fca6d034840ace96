//! Checkpoints in an object store: S3, Google Cloud Storage, Azure, or a folder that mirrors them.
//!
//! A remote checkpoint is the local folder, object by object: `<prefix>/step-00000100/<file>`. Its manifest is put last, which is the
//! commit: a step without one is no checkpoint. Nothing is believed on the way back either: what is fetched is verified byte by byte
//! before it gets its name.

mod fetch;
mod journal;
mod upload;

use std::iter;
use std::sync::{Arc, Once};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt, ObjectStoreScheme, RetryConfig};
use tokio::runtime::Runtime;
use url::Url;

use super::MANIFEST;
use super::manifest::Manifest;
use super::names::{parse_step_dir, step_dir};
use crate::error::bad_input;

pub use fetch::Fetched;
pub use upload::{Uploaded, is_uploaded};

/// Bytes that travel in one piece.
const PIECE_BYTES: u64 = 16 << 20;
/// The time alone limits how often a request is tried again.
const MAX_RETRIES: usize = 1_000_000;
/// How long one request may take: a piece of a file, on a slow line with three others beside it.
const REQUEST_TIMEOUT: &str = "10m";
/// How the failure of a store is told apart from that of the checkpoint itself.
const STORE: &str = "the object store";

/// An open folder of checkpoints in an object store. Every call waits for its answer.
pub struct Remote {
    url: String,
    store: Arc<dyn ObjectStore>,
    prefix: Key,
    /// Where the URL names a single checkpoint.
    only: Option<u64>,
    runtime: Runtime,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Remote({})", self.url)
    }
}

/// Checks the form of a URL, without asking anybody.
///
/// # Errors
/// What is expected, in words.
pub fn check_url(url: &str) -> Result<(), String> {
    const FORMS: &str = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///FOLDER";
    let parsed = Url::parse(url).map_err(|_| match url.starts_with('/') {
        true => format!("`{url}` is a path: for a folder write \"file://{url}\""),
        false => format!("`{url}` is no URL: expected {FORMS}"),
    })?;
    // In an Azure URL the part before the @ is the container.
    let secret = parsed.password().is_some() || !(parsed.username().is_empty() || parsed.scheme().starts_with("abfs"));
    if secret {
        let store = format!("{}://{}{}", parsed.scheme(), parsed.host_str().unwrap_or(""), parsed.path());
        return Err(format!(
            "a URL of a store holds no credentials, they would end up in files: write `{store}`, and put them into the environment"
        ));
    }
    if parsed.query().is_some() || parsed.fragment().is_some() {
        return Err(format!("`{url}` has a part behind a `?` or `#`, which means nothing here"));
    }
    if parsed.scheme() == "file" && parsed.host_str().is_some_and(|host| !host.is_empty()) {
        return Err(format!("`{url}` names a host: a folder is written with three slashes, file:///FOLDER"));
    }
    match ObjectStoreScheme::parse(&parsed) {
        Ok((ObjectStoreScheme::Memory | ObjectStoreScheme::Http, _)) | Err(_) => {
            Err(format!("`{url}` is of no store that is known: expected {FORMS}"))
        }
        Ok(_) => Ok(()),
    }
}

/// Checks the URL of a place for a run's checkpoints, as [`check_url`] does.
///
/// # Errors
/// Also when it is that of one checkpoint.
pub fn check_folder_url(url: &str) -> Result<(), String> {
    check_url(url)?;
    match url.trim_end_matches('/').rsplit('/').next().and_then(parse_step_dir) {
        Some(_) => Err(format!("`{url}` is the place of one checkpoint: leave the last part out")),
        None => Ok(()),
    }
}

impl Remote {
    /// Opens a store by its URL: `s3://`, `gs://`, `az://` or `file://`. Credentials, regions and endpoints come from the variables
    /// `AWS_*`, `GOOGLE_*` and `AZURE_*` of the environment. `retry`: how long a request that fails is tried again.
    ///
    /// # Errors
    /// `BadInput` when the URL is of no such store, or a variable is wrong. Nobody is asked yet.
    pub fn open(url: &str, retry: Duration) -> Result<Self> {
        check_url(url).map_err(bad_input)?;
        let parsed = Url::parse(url).context("a URL that was just checked")?;
        let (scheme, key) = ObjectStoreScheme::parse(&parsed).context("a URL that was just checked")?;
        trust_rustls();
        let retry = RetryConfig { retry_timeout: retry, max_retries: MAX_RETRIES, ..RetryConfig::default() };
        let store = connect(&scheme, url, retry).map_err(|e| bad_input(format!("opening {url}: {e:#}")))?;
        // The URL of one checkpoint means that one.
        let only = step_of(&key);
        let parts: Vec<_> = key.parts().collect();
        let prefix: Key = parts[..parts.len() - usize::from(only.is_some())].iter().cloned().collect();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the upload's runtime")?;
        Ok(Self { url: trimmed(url).to_string(), store, prefix, only, runtime })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    fn key(&self, step: u64, file: &str) -> Key {
        self.prefix.clone().join(step_dir(step)).join(file)
    }

    /// Steps that are there, newest first. Whether their manifests are good is seen when they are read.
    ///
    /// # Errors
    /// When the store cannot be asked.
    pub fn steps(&self) -> Result<Vec<u64>> {
        if let Some(step) = self.only {
            return Ok(vec![step]);
        }
        let listed = self.runtime.block_on(self.store.list_with_delimiter(Some(&self.prefix)));
        let listed = listed.with_context(|| format!("listing the checkpoints of {}", self.url))?;
        let mut steps: Vec<u64> = listed.common_prefixes.iter().filter_map(step_of).collect();
        // Some servers list everything below, whatever they are asked.
        let depth = self.prefix.parts().count();
        steps.extend(listed.objects.iter().filter_map(|o| parse_step_dir(o.location.parts().nth(depth)?.as_ref())));
        steps.sort_unstable_by(|a, b| b.cmp(a));
        steps.dedup();
        Ok(steps)
    }

    /// The manifest of a step, checked against its own checksum.
    ///
    /// # Errors
    /// When there is none, it is damaged, or the store cannot be asked.
    pub fn manifest(&self, step: u64) -> Result<Manifest> {
        let bytes = self.runtime.block_on(self.manifest_bytes(step))?;
        self.parse(step, bytes)
    }

    /// What a step's manifest says, if it is one.
    fn parse(&self, step: u64, bytes: Option<Vec<u8>>) -> Result<Manifest> {
        let bytes = bytes
            .with_context(|| format!("{}/{} has no {MANIFEST}: it was not uploaded to the end", self.url, step_dir(step)))?;
        let manifest = Manifest::parse(&bytes)?;
        let inside = manifest.meta.step;
        anyhow::ensure!(inside == step, "the folder is named after step {step}, its manifest is of step {inside}");
        Ok(manifest)
    }

    async fn manifest_bytes(&self, step: u64) -> Result<Option<Vec<u8>>> {
        match self.store.get(&self.key(step, MANIFEST)).await {
            Ok(found) => Ok(Some(found.bytes().await.context(STORE)?.to_vec())),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(anyhow!(e).context(format!("reading {}/{}/{MANIFEST}", self.url, step_dir(step)))),
        }
    }
}

/// One place has one URL.
fn trimmed(url: &str) -> &str {
    url.trim_end_matches('/')
}

/// The step of the checkpoint that a key is the place of.
fn step_of(key: &Key) -> Option<u64> {
    key.parts().next_back().and_then(|last| parse_step_dir(last.as_ref()))
}

fn connect(scheme: &ObjectStoreScheme, url: &str, retry: RetryConfig) -> object_store::Result<Arc<dyn ObjectStore>> {
    let timeout = || ("timeout".to_string(), REQUEST_TIMEOUT.to_string());
    let variables = |prefix: &'static str| {
        let all = std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
        all.filter(move |(key, _)| key.starts_with(prefix)).map(|(key, value)| (key.to_ascii_lowercase(), value))
    };
    // The builders have the same methods and no trait in common.
    macro_rules! built {
        ($builder:ident, $settings:expr) => {{
            let builder = $builder::new().with_url(url).with_retry(retry);
            // What is no setting is some other program's variable.
            let with = |b: $builder, (key, value): (String, String)| match key.parse() {
                Ok(key) => b.with_config(key, value),
                Err(_) => b,
            };
            Arc::new($settings.fold(builder, with).build()?)
        }};
    }
    Ok(match scheme {
        ObjectStoreScheme::AmazonS3 => {
            // The server itself compares what arrives; a variable may turn that off.
            let first = [("aws_checksum_algorithm".to_string(), "sha256".to_string()), timeout()];
            built!(AmazonS3Builder, first.into_iter().chain(variables("AWS_")))
        }
        ObjectStoreScheme::GoogleCloudStorage => {
            built!(GoogleCloudStorageBuilder, iter::once(timeout()).chain(variables("GOOGLE_")))
        }
        ObjectStoreScheme::MicrosoftAzure => {
            built!(MicrosoftAzureBuilder, iter::once(timeout()).chain(variables("AZURE_")))
        }
        // What is noted as arrived is to outlive a power cut.
        _ => Arc::new(LocalFileSystem::new().with_fsync(true)),
    })
}

/// Names the cryptography that HTTPS uses: there is no default one in this build.
fn trust_rustls() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Somebody else in the process may have named one, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_stores_and_others() {
        for good in
            ["s3://bucket/a/b", "s3://bucket", "gs://b/x", "az://c/x", "abfss://c@a.dfs.core.windows.net/x", "file:///tmp/x y"]
        {
            check_url(good).unwrap();
        }
        for (bad, says) in [
            ("/tmp/x", "\"file:///tmp/x\""),
            ("tmp/x", "is no URL"),
            ("ftp://host/x", "no store that is known"),
            ("memory:///x", "no store that is known"),
            ("https://example.com/x", "no store that is known"),
            ("file://tmp/x", "three slashes"),
            ("s3://key:secret@bucket/x", "write `s3://bucket/x`, and put them into the environment"),
            ("s3://key@bucket/x", "holds no credentials"),
            ("s3://bucket/x?versionId=1", "behind a `?`"),
            ("", "is no URL"),
        ] {
            let said = check_url(bad).unwrap_err();
            assert!(said.contains(says) && !said.contains("secret"), "{bad}: {said}");
        }
        check_folder_url("s3://bucket/step-100/x").unwrap();
        assert!(check_folder_url("s3://bucket/x/step-00000100/").unwrap_err().contains("leave the last part out"));
    }

    #[test]
    fn a_url_may_name_one_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let url = |tail: &str| format!("file://{}/ckpt{tail}", dir.path().display());
        let open = |tail| Remote::open(&url(tail), Duration::ZERO).unwrap();
        assert_eq!(open("").steps().unwrap(), [] as [u64; 0]);
        assert_eq!(open("/step-00000120/").steps().unwrap(), [120]);
        assert_eq!(open("/step-00000120").key(120, "x"), open("/").key(120, "x"));
        assert!(open("").manifest(7).unwrap_err().to_string().contains("was not uploaded to the end"));
    }
}
