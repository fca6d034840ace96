//! `zaya eval --tasks arc_easy,mmlu`: a run of benchmark tasks.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use serde_json::{Map, Value, json};

use super::{RunArgs, TaskArgs};
use crate::checkpoint::ModelSource;
use crate::cli::{BackendName, in_pool, unwritable};
use crate::error::{bad_input, exit_code};
use crate::eval::harness::encode::Encode;
use crate::eval::harness::run::{Answers, Work, line};
use crate::eval::harness::score::code::{CodeRunner, Verdict};
use crate::eval::harness::score::results::{self, RunInfo, Scored, results};
use crate::eval::harness::tasks::build::Options as BuildOptions;
use crate::eval::harness::tasks::documents::Library;
use crate::eval::harness::tasks::registry::{Node, Registry};
use crate::eval::runner::{ModelRunner, Options as RunnerOptions};
use crate::eval::sandbox::{Limits, Sandbox};
use crate::eval::session::identity::{self, Identity};
use crate::eval::session::log::RequestLog;
use crate::eval::session::progress::{Progress, Running};
use crate::eval::session::work::{self, Spent};
use crate::eval::session::{Encoding, Tasks, files, html, plan_all, score_all, select, table};
use crate::eval::tokenizer::EvalTokenizer;
use crate::machine::peak_resident_bytes;
use crate::model::Model;
use crate::tensor::backend::{Backend, Precision};
use crate::tensor::cpu::Cpu;
use crate::tensor::hip::Hip;
use crate::text::sha256_hex;
use crate::train::backend::require_bf16;

/// Bytes of prompts from which on the faster tokenizer is worth its start.
const MUCH_TEXT: usize = 4 << 20;

pub fn run(args: &RunArgs, model_dir: &Path, output: &Path, backend: BackendName) -> Result<u8> {
    let started = Instant::now();
    let options = &args.tasks_only;
    let build_options = build_options(options)?;
    let registry = registry(&options.task_path)?;
    let nodes = select(&registry, &args.tasks)?;
    let sandbox = sandbox(&nodes, options.allow_code_exec)?;
    claim_folder(output)?;
    let source = ModelSource::open(model_dir)?;
    let context = source.config().max_position_embeddings;
    let max_length = options.max_length.unwrap_or(context);
    if max_length == 0 || max_length > context {
        return Err(bad_input(format!("--max-length is {max_length}, expected 1 to the model's context of {context} tokens")));
    }
    let mut tokenizer = tokenizer(args.tokenizer.as_deref(), model_dir, &source)?;
    let library = library(args)?;
    in_pool(args.threads, || {
        let encoding = Encoding { compat: options.compat.compat(), add_special: options.add_bos_token, max_length };
        let plan = || {
            let tasks = Tasks::build(nodes, &library, &build_options)?;
            tasks.skipped.iter().for_each(|(_, says)| tell!("warning: left out: {says}"));
            tasks.notes().iter().for_each(|n| tell!("note: {n}"));
            if tasks.text_bytes() > MUCH_TEXT {
                tokenizer.speed_up()?;
            }
            let (plans, work) = plan_all(&tasks.built, &tokenizer, &encoding)?;
            anyhow::Ok((tasks, plans, work))
        };
        // The files of a large model take their time to be hashed.
        let (planned, identity) = rayon::join(plan, || identity::of(&source));
        let (tasks, plans, work) = planned?;
        let session = Session {
            args,
            model_dir,
            output,
            source: &source,
            identity: identity?,
            tokenizer: &tokenizer,
            precision: args.dtype.map_or_else(|| source.precision(), |d| d.precision()),
            backend,
            max_length,
        };
        let mut progress = Progress::new(Running::new(&tasks.built, &plans));
        let answered = session.answer(&work, &mut progress);
        progress.finish();
        let ready = progress.begun().map(|begun| begun - started);
        drop(progress);
        let (answers, spent) = answered?;
        drop(work);
        let code = sandbox.as_ref().map(|s| s as &dyn CodeRunner);
        let Tasks { nodes, built, skipped, .. } = tasks;
        let (scored, requests) = score_all(&built, &plans, &answers, code, options.bootstrap_iters, options.log_requests)?;
        session.write(&nodes, &scored, &skipped, spent, &requests, (started, ready))?;
        Ok(if skipped.is_empty() { exit_code::OK } else { exit_code::PARTIAL })
    })
}

/// The tasks that come with the program, and the user's.
pub(super) fn registry(task_path: &[PathBuf]) -> Result<Registry> {
    let mut registry = Registry::built_in()?;
    task_path.iter().try_for_each(|p| registry.add_path(p))?;
    Ok(registry)
}

fn library(args: &RunArgs) -> Result<Library> {
    if let Some(no_folder) = args.data.iter().find(|d| !d.is_dir()) {
        return Err(bad_input(format!("--data {} is not a folder: tasks read their data from folders", no_folder.display())));
    }
    Ok(Library::new(args.data.clone()))
}

fn build_options(options: &TaskArgs) -> Result<BuildOptions> {
    if let Some(limit) = options.limit.filter(|l| !(l.is_finite() && *l > 0.0)) {
        return Err(bad_input(format!("--limit is {limit}, expected a number of documents, or a share between 0 and 1")));
    }
    if options.batch_tokens == 0 {
        return Err(bad_input("--batch-tokens must be at least 1"));
    }
    Ok(BuildOptions {
        compat: options.compat.compat(),
        num_fewshot: options.num_fewshot,
        limit: options.limit,
        fewshot_seed: options.seed,
        generation: options.gen_kwargs.as_deref().map_or_else(|| Ok(Map::new()), gen_kwargs)?,
    })
}

/// `{"temperature": 0.5}` or `temperature=0.5,do_sample=true`.
fn gen_kwargs(text: &str) -> Result<Map<String, Value>> {
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(text).map_err(|e| bad_input(format!("--gen-kwargs {text}: not a JSON object: {e}")));
    }
    let pair = |item: &str| {
        let (key, value) = item
            .split_once('=')
            .ok_or_else(|| bad_input(format!("--gen-kwargs {text}: `{item}` is not of the form KEY=VALUE")))?;
        let value = match value.trim() {
            "True" => Value::Bool(true),
            "False" => Value::Bool(false),
            other => serde_json::from_str(other).unwrap_or_else(|_| Value::String(other.to_string())),
        };
        Ok((key.trim().to_string(), value))
    };
    text.split(',').filter(|item| !item.trim().is_empty()).map(pair).collect()
}

/// Where generated programs run, if a task has such and they may.
pub(super) fn sandbox(nodes: &[Node], allowed: bool) -> Result<Option<Sandbox>> {
    let Some(task) = nodes.iter().flat_map(Node::tasks).find(|t| t.unsafe_code) else { return Ok(None) };
    if !allowed {
        return Err(bad_input(format!(
            "{} runs programs that the model writes; --allow-code-exec permits it, each in a sandbox of its own",
            task.name
        )));
    }
    let sandbox = Sandbox::new(Limits::default());
    if sandbox.run("", "")? == Verdict::NoPython {
        return Err(bad_input(format!("{} needs python3 to run programs, and there is none in PATH", task.name)));
    }
    Ok(Some(sandbox))
}

/// The tokenizer that was named, or the model's own.
pub(super) fn tokenizer(named: Option<&Path>, model: &Path, source: &ModelSource) -> Result<EvalTokenizer> {
    let Some(path) = named.map(Path::to_path_buf).or_else(|| source.tokenizer()) else {
        return Err(bad_input(format!("{} has no tokenizer.json that fits it: name one with --tokenizer", model.display())));
    };
    source.warn_of_other_tokenizer(&path)?;
    EvalTokenizer::load(&path, source.config())
}

/// That results can be written is found out before the work.
fn claim_folder(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| unwritable(folder, &e))?;
    tempfile::tempfile_in(folder).map_err(|e| unwritable(folder, &e))?;
    Ok(())
}

/// A run whose requests are known.
struct Session<'a> {
    args: &'a RunArgs,
    model_dir: &'a Path,
    output: &'a Path,
    source: &'a ModelSource,
    identity: Identity,
    tokenizer: &'a EvalTokenizer,
    precision: Precision,
    backend: BackendName,
    max_length: usize,
}

impl Session<'_> {
    fn answer(&self, work: &Work, watch: &mut Progress) -> Result<(Answers, Spent)> {
        match self.backend {
            BackendName::Cpu => self.answer_on(&Cpu::new(self.precision), work, watch),
            BackendName::Hip => {
                require_bf16(self.precision)?;
                self.answer_on(&Hip::open(0)?, work, watch)
            }
            BackendName::Candle => Err(bad_input("zaya eval has no tasks on --backend candle: leave it out")),
        }
    }

    fn answer_on<B: Backend>(&self, backend: &B, work: &Work, watch: &mut Progress) -> Result<(Answers, Spent)> {
        let options = &self.args.tasks_only;
        let mut log = RequestLog::open(&self.output.join("requests.log"), &self.key(), options.resume)?;
        let model = Model::new(self.source.config().clone());
        let params = self.source.params(backend)?;
        let options = RunnerOptions {
            token_budget: options.batch_tokens,
            memory_budget_bytes: options.cache_mib << 20,
            max_length: self.max_length,
            end_of_text: self.tokenizer.eos().map(|(id, _)| id),
            seed: options.seed,
        };
        let mut runner = ModelRunner::new(backend, &model, &params, options);
        work::answer(&mut runner, work, self.tokenizer, &mut log, watch)
    }

    /// All that an answer depends on beside its request.
    fn key(&self) -> String {
        let parts = json!([
            env!("CARGO_PKG_VERSION"),
            self.identity.sha256,
            self.tokenizer.sha256,
            format!("{:?}", self.backend),
            format!("{:?}", self.precision),
            self.max_length,
            self.args.tasks_only.seed,
        ]);
        sha256_hex(parts.to_string().as_bytes())[..16].to_string()
    }

    fn write(
        &self,
        nodes: &[Node],
        scored: &std::collections::BTreeMap<String, Scored>,
        skipped: &[(String, String)],
        spent: Spent,
        requests: &[String],
        (started, ready): (Instant, Option<Duration>),
    ) -> Result<()> {
        let folder = self.output;
        for (name, (_, score)) in scored {
            let text: String = score.samples.iter().map(line).collect();
            files::write(&folder.join(format!("samples_{name}.jsonl")), &text)?;
        }
        if self.args.tasks_only.log_requests {
            files::write(&folder.join("requests.jsonl"), &requests.concat())?;
        }
        let results = results(nodes, scored, &self.info(scored, skipped, spent)?);
        files::write(&folder.join("results.json"), &results::text(&results))?;
        files::write(&folder.join("report.html"), &html::render(&results))?;
        let run = json!({
            "date": SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64()),
            "seconds_to_first_forward": ready.map(|r| r.as_secs_f64()),
            "total_evaluation_time_seconds": started.elapsed().as_secs_f64(),
            "threads": rayon::current_num_threads(),
            "peak_memory_bytes": peak_resident_bytes(),
        });
        files::write(&folder.join("run.json"), &(serde_json::to_string_pretty(&run)? + "\n"))?;
        say!("{}", table::render(&results).trim_end());
        say!("results in {}", folder.join("results.json").display());
        Ok(())
    }

    fn info(
        &self,
        scored: &std::collections::BTreeMap<String, Scored>,
        skipped: &[(String, String)],
        spent: Spent,
    ) -> Result<RunInfo> {
        let options = &self.args.tasks_only;
        let map = |v: Value| v.as_object().cloned().unwrap_or_default();
        let token = |t: Option<(u32, &str)>| t.map_or(json!(["None", "None"]), |(id, text)| json!([text, id.to_string()]));
        let dtype = match self.precision {
            Precision::F32 => "torch.float32",
            Precision::Bf16 => "torch.bfloat16",
        };
        let gen_kwargs = options.gen_kwargs.as_deref().map(gen_kwargs).transpose()?;
        let mut data = Map::new();
        for (built, _) in scored.values() {
            for (_, path) in &built.files {
                let name = path.display().to_string();
                if !data.contains_key(&name) {
                    data.insert(name, identity::sha256_of(path)?.into());
                }
            }
        }
        data.sort_keys();
        let hashes: Map<String, Value> = scored.iter().map(|(name, (_, s))| (name.clone(), s.task_hash().into())).collect();
        Ok(RunInfo {
            config: map(json!({
                "model": self.model_dir.display().to_string(),
                "model_args": null,
                "model_num_parameters": self.identity.num_parameters,
                "model_dtype": dtype,
                "model_revision": "main",
                "model_sha": self.identity.sha256,
                "batch_size": null,
                "batch_sizes": [],
                "device": format!("{:?}", self.backend).to_lowercase(),
                "use_cache": null,
                "limit": options.limit,
                "bootstrap_iters": options.bootstrap_iters,
                "gen_kwargs": gen_kwargs,
                "random_seed": options.seed,
                "numpy_seed": options.seed,
                "torch_seed": options.seed,
                "fewshot_seed": options.seed,
            })),
            extra: map(json!({
                "date": null,
                "transformers_version": null,
                "lm_eval_version": "0.4.13",
                "upper_git_hash": null,
                "tokenizer_pad_token": token(self.tokenizer.pad()),
                "tokenizer_eos_token": token(self.tokenizer.eos()),
                "tokenizer_bos_token": token(self.tokenizer.bos()),
                "eot_token_id": self.tokenizer.eos().map(|(id, _)| id),
                "max_length": self.max_length,
                "task_hashes": hashes,
                "chat_template": null,
                "chat_template_sha": null,
                "system_instruction": null,
                "system_instruction_sha": null,
                "fewshot_as_multiturn": false,
                "model_source": "zaya",
                "model_name": self.model_dir.display().to_string(),
            })),
            zaya: map(json!({
                "model_sha256": self.identity.sha256,
                "step": self.identity.step,
                "tokenizer_sha256": self.tokenizer.sha256,
                "data_sha256": data,
                "add_bos_token": options.add_bos_token,
                "tokens": {
                    "forward": spent.usage.forward,
                    "padded": spent.usage.padded,
                    "reused": spent.usage.reused,
                    "trie": spent.trie,
                },
                "skipped": skipped.iter().map(|(name, says)| (name.clone(), json!(says))).collect::<Map<_, _>>(),
            })),
            compat: options.compat.compat(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_kwargs_are_json_or_pairs() {
        let want = json!({"max_gen_toks": 64, "do_sample": true, "until": "Q:", "temperature": 0.5});
        let pairs = gen_kwargs("max_gen_toks=64, do_sample=True,until=Q:,temperature=0.5").unwrap();
        assert_eq!(Value::Object(pairs), want);
        assert_eq!(Value::Object(gen_kwargs(&want.to_string()).unwrap()), want);
        assert!(gen_kwargs("max_gen_toks").unwrap_err().to_string().contains("KEY=VALUE"));
    }
}
