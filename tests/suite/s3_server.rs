//! An S3 server on this machine: objects are files below a temporary folder.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::channel;

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use tempfile::TempDir;

const ACCESS_KEY: &str = "an-access-key";
const SECRET_KEY: &str = "a-secret-key";

/// Runs until the tests end.
pub struct S3Server {
    dir: TempDir,
    address: SocketAddr,
}

impl S3Server {
    /// With one bucket, `bucket`. Requests must be signed.
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("bucket")).unwrap();
        let mut service = S3ServiceBuilder::new(FileSystem::new(dir.path()).unwrap());
        service.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
        let service = service.build();
        let (tell, told) = channel();
        let body = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let serve = async move {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                tell.send(listener.local_addr().unwrap()).unwrap();
                loop {
                    let (socket, _) = listener.accept().await.unwrap();
                    let service = service.clone();
                    tokio::spawn(async move {
                        // A client that was killed leaves half a request, which is nobody's fault.
                        let _ = Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(socket), service).await;
                    });
                }
            };
            runtime.block_on(serve);
        };
        std::thread::spawn(body);
        Self { dir, address: told.recv().unwrap() }
    }

    pub fn url(&self, prefix: &str) -> String {
        format!("s3://bucket/{prefix}")
    }

    /// Where the objects of a prefix lie.
    pub fn folder(&self, prefix: &str) -> PathBuf {
        self.dir.path().join("bucket").join(prefix)
    }

    /// Gives a program what it needs to reach this server.
    pub fn known_to<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        reach(command, &format!("http://{}", self.address))
    }
}

/// Gives a program an endpoint and credentials, and takes a proxy away.
pub fn reach<'a>(command: &'a mut Command, endpoint: &str) -> &'a mut Command {
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "AWS_CHECKSUM_ALGORITHM"] {
        command.env_remove(name);
    }
    command.env("AWS_ENDPOINT", endpoint).env("AWS_ALLOW_HTTP", "true").env("AWS_REGION", "us-east-1");
    command.env("AWS_ACCESS_KEY_ID", ACCESS_KEY).env("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
}
