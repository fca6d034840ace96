//! Uploads of a run's checkpoints: which of them, and what is told of them (`docs/CHECKPOINT.md`).

use std::time::Duration;

use super::Run;
use crate::checkpoint::remote::is_uploaded;
use crate::train::engine::Engine;
use crate::train::report;
use crate::train::uploader::UploadEnded;

/// Between two looks at whether a signal came while the end of a run waits for an upload.
const PATIENCE: Duration = Duration::from_millis(200);

impl<E: Engine> Run<'_, E> {
    /// Asks for the upload of a checkpoint that is safe on the disk.
    pub(super) fn offer_upload(&mut self, step: u64) {
        let kept = self.recipe.checkpoint.keep_every.is_some_and(|n| step.is_multiple_of(n)) || self.borders().contains(&step);
        if let Some(uploader) = &mut self.kept.uploader {
            uploader.offer(step, kept);
        }
    }

    /// Asks for the upload of the checkpoint that the run goes on from, unless it is known to be there.
    pub(super) fn offer_start(&mut self, step: u64) {
        if let Some(uploader) = &self.kept.uploader
            && !is_uploaded(uploader.url(), &uploader.dir(step))
        {
            self.offer_upload(step);
        }
    }

    /// Tells of uploads that have ended.
    pub(super) fn look_at_uploads(&mut self) {
        while let Some(ended) = self.kept.uploader.as_mut().and_then(|u| u.wait(Duration::ZERO)) {
            self.tell_upload(ended);
        }
    }

    /// Waits for all uploads of a run that ends.
    pub(super) fn finish_uploads(&mut self) {
        self.look_at_uploads();
        let (mut told, before) = (None, self.stop.signalled());
        while let Some(uploader) = self.kept.uploader.as_mut().filter(|u| u.is_busy()) {
            let steps = uploader.needed();
            if told.as_ref() != Some(&steps) {
                let list: Vec<String> = steps.iter().map(u64::to_string).collect();
                tell!(
                    "waiting for the upload of step {} to {}; a signal ends the run without it, and --resume goes on with it",
                    list.join(", "),
                    uploader.url()
                );
                told = Some(steps);
            }
            if let Some(ended) = uploader.wait(PATIENCE) {
                self.tell_upload(ended);
            } else if before.is_none() && self.stop.signalled().is_some() {
                tell!("warning: not waiting for the upload any longer; --resume goes on with it");
                return;
            }
        }
    }

    fn tell_upload(&mut self, ended: UploadEnded) {
        let url = self.kept.uploader.as_ref().map_or(String::new(), |u| u.url().to_string());
        match ended.outcome {
            Ok(uploaded) => self.write_metrics(&report::checkpoint_uploaded(&url, &uploaded)),
            Err(e) => {
                self.kept.upload_failures += 1;
                tell!("warning: the checkpoint of step {} is not in {url}: {e:#}; the next one is tried as usual", ended.step);
                self.write_metrics(&report::upload_failed(ended.step, self.kept.upload_failures, &url, &e));
            }
        }
    }
}
