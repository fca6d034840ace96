//! Every key of a recipe, once: type, default, what resuming makes of a change, and its documentation.

use super::schema::Default::{Absent, Required, Value};
use super::schema::Kind::{self, *};
use super::schema::Range::*;
use super::schema::Resume::{self, *};
use super::schema::{Default, Key};

const fn key(path: &'static str, kind: Kind, default: Default, resume: Resume, doc: &'static str) -> Key {
    Key { path, kind, default, resume, doc }
}

const ANY: u64 = i64::MAX as u64;
const WIDTH: u64 = 1 << 24;
const PRESET: Default = Absent("the preset's");
const SHAPE: Resume = Fixed("the checkpoint holds a model of the old shape");
const MEANING: Resume = Fixed("the trained weights would mean something else");
const SAMPLES: Resume = Fixed("the order of the samples would no longer be the run's");
const LOSS: Resume = Fixed("the same samples would be trained on in another way");
const MOMENTS: Resume = Fixed("the optimizer's state belongs to the old value");
const FROM_HERE: Resume = Notice("the new value holds from the resumed step on");
const NEW_CURVE: Resume =
    Notice("the learning rate of every step follows the new curve from the resumed step on; steps already made stay as they are");
const REGROUPED: Resume =
    Notice("sums are grouped differently, so the results differ in their last bits from the run that was not stopped");
const NEW_SHARES: Resume = Notice(
    "samples drawn so far stay drawn; from the resumed step on sources are mixed by the new values, and each goes on with its next sample",
);
const STAGE: Resume = Fixed("the stages of a run are laid out when it starts");
const ATTENTION: &[&str] = &["full", "sliding"];
const SCHEDULES: &[&str] = &["cosine", "constant", "linear", "wsd"];

/// In the order of `docs/RECIPE.md` and of the resolved recipe.
#[rustfmt::skip]
pub const KEYS: &[Key] = &[
    key("run.dir", Path, Required, Free, "Directory of the run: `recipe.toml` (resolved), `metrics.jsonl`, `ckpt/`."),
    key("run.seed", Integer { min: 0, max: ANY }, Value("0"), SAMPLES, "Seed of the initial weights and of the sample order."),
    key("run.time_limit", Duration, Absent("no limit"), Free, "Time after which the run saves a checkpoint and ends, e.g. `\"12h\"`. `--time-limit` goes before it."),

    key("model.preset", Choice(&crate::model::presets::NAMES), Absent("all fields are given"), SHAPE, "A named shape. Any field below given beside it takes the place of the preset's."),
    key("model.vocab_size", Integer { min: 1, max: i32::MAX as u64 }, PRESET, SHAPE, "Rows of the embedding; at least the tokenizer's number of ids."),
    key("model.hidden_size", Integer { min: 1, max: WIDTH }, PRESET, SHAPE, "D, width of the residual stream."),
    key("model.num_blocks", Integer { min: 1, max: 4096 }, PRESET, SHAPE, "Decoder blocks; each is an attention and a mixture-of-experts sub-layer."),
    key("model.num_query_heads", Integer { min: 1, max: 65_536 }, PRESET, SHAPE, "Query heads that are computed (after CCA's compression)."),
    key("model.num_kv_heads", Integer { min: 1, max: 65_536 }, PRESET, SHAPE, "Key/value heads; divides `num_query_heads`."),
    key("model.head_dim", Integer { min: 1, max: 65_536 }, PRESET, SHAPE, "Channels of one head."),
    key("model.num_experts", Integer { min: 1, max: 65_536 }, PRESET, SHAPE, "Experts of a block, the skip class not counted."),
    key("model.expert_width", Integer { min: 1, max: WIDTH }, PRESET, SHAPE, "F, width of an expert's SwiGLU."),
    key("model.router_width", Integer { min: 1, max: WIDTH }, PRESET, SHAPE, "R, width of the router."),
    key("model.attention", ChoiceOrArray(ATTENTION), Absent("the preset's, else `\"full\"`"), MEANING, "How far back each block looks: one word for all blocks, or an array with one word per block."),
    key("model.sliding_window", IntegerOrNone { min: 1, max: i32::MAX as u64 }, Absent("the preset's, else none"), MEANING, "Tokens a sliding block sees, the current one included. Needed when a block is sliding."),
    key("model.rope_theta", Number(Positive), Absent("the preset's, else 10000"), MEANING, "RoPE base of full blocks."),
    key("model.rope_theta_sliding", Number(Positive), Absent("the preset's, else 10000"), MEANING, "RoPE base of sliding blocks."),
    key("model.partial_rotary_factor", Number(Share), Absent("the preset's, else 0.5"), MEANING, "Share of a head's channels that rotate, in full blocks."),
    key("model.partial_rotary_factor_sliding", Number(Share), Absent("the preset's, else 0.5"), MEANING, "The same in sliding blocks."),
    key("model.max_position_embeddings", Integer { min: 1, max: i32::MAX as u64 }, PRESET, FROM_HERE, "Longest sequence the model is meant for, tokens; `train.seq_len` may not be longer."),
    key("model.norm_eps", Number(Positive), Absent("the preset's, else 1e-5"), MEANING, "Epsilon of every RMS norm but the router's."),
    key("model.router_norm_eps", Number(Positive), Absent("the preset's, else `norm_eps`"), MEANING, "Epsilon of the router's RMS norm (1e-6 in Zyphra's code of November 2025)."),
    key("model.skip_mode", Choice(&["zero", "identity"]), Absent("the preset's, else `\"zero\"`"), MEANING, "What a token gets that the router sends to the skip class: nothing, or its normed input times the class's probability."),
    key("model.initializer_range", Number(Positive), Absent("the preset's, else 0.02"), Notice("it only matters at step 0"), "Standard deviation of the initial weights."),
    key("model.pad_token_id", IntegerOrNone { min: 0, max: u32::MAX as u64 }, Absent("the preset's, else none"), MEANING, "Token whose embedding starts at zero and gets no gradient from look-ups."),
    key("model.bos_token_id", IntegerOrNone { min: 0, max: u32::MAX as u64 }, Absent("the preset's, else none"), Free, "Beginning-of-sequence token, for exported files; training adds none."),
    key("model.eos_token_id", IntegerOrNone { min: 0, max: u32::MAX as u64 }, Absent("the preset's, else none"), Free, "End-of-sequence token, for generation and exported files."),

    key("tokenizer.path", Path, Absent("no tokenizer: its size is not checked against the model's"), MayMove, "A Hugging Face `tokenizer.json`: the one that made the token shards."),

    key("data.sources.*.name", Text, Absent("file name of the first shard"), SAMPLES, "Name of the source in tables and metrics; unique."),
    key("data.sources.*.path", Paths, Required, MayMove, "Token shards: prefix of a Megatron `.bin`/`.idx` pair (\"x/train\" for x/train.bin and x/train.idx), an array of such, or a pattern with `*` and `?` in the file name. A pattern is spelt out when the recipe is read."),
    key("data.sources.*.weight", Number(NotNegative), Value("1.0"), NEW_SHARES, "Share of the samples, relative to the other sources' weights."),
    key("data.sources.*.max_epochs", Number(Positive), Absent("no limit"), NEW_SHARES, "How often the run may go through the source, such as `4` or `0.5`. From there on its share goes to the other sources; a run whose sources all end before it does is refused."),
    key("data.validation.*.name", Text, Absent("file name of the first shard"), Free, "Name of the held-out set in metrics; unique."),
    key("data.validation.*.path", Paths, Required, Free, "Token shards of the held-out set, as in `data.sources`."),
    key("data.packing", Choice(&["stream", "best-fit"]), Value("\"stream\""), SAMPLES, "How documents become sequences. `stream`: end to end, cut every `seq_len` tokens, so that no token is lost. `best-fit`: whole documents, as many as fit, the rest padding; a conversation that is too long loses reasoning and keeps its answers, other documents that are too long are passed over (docs/DATA.md)."),
    key("data.document_mask", Bool, Value("false"), LOSS, "Whether documents that share a sequence are hidden from each other: attention, convolutions and value shift begin anew with each document, and its first token is left out of the loss."),
    key("data.eod_mask_loss", Bool, Value("false"), LOSS, "Whether the first token of a document is left out of the loss (nothing before it could foretell it)."),

    key("train.steps", Integer { min: 1, max: ANY }, Absent("from `train.tokens`"), NEW_CURVE, "Optimizer steps of the run. Give this or `train.tokens`."),
    key("train.tokens", Tokens { min: 1 }, Absent("from `train.steps`"), NEW_CURVE, "Tokens of the run, e.g. `\"8T\"`; as many whole steps as fit."),
    key("train.global_batch_tokens", Tokens { min: 1 }, Required, SAMPLES, "Tokens of one optimizer step; a multiple of `micro_batch * seq_len`."),
    key("train.micro_batch", Integer { min: 1, max: i32::MAX as u64 }, Value("1"), REGROUPED, "Sequences of one forward and backward pass; decides memory, not the result."),
    key("train.seq_len", Length, Required, SAMPLES, "Tokens of a sequence."),
    key("train.precision", Choice(&["f32", "bf16"]), Value("\"f32\""), Fixed("the run's numbers would change in the middle"), "`f32`, or `bf16` compute with f32 master weights."),
    key("train.head_precision", Choice(&["f32", "bf16"]), Value("\"f32\""), Fixed("the run's numbers would change in the middle"), "Products of the tied head and its gradients. `f32` also under `precision = \"bf16\"`, as ZAYA1 has it; `bf16` is faster where the CPU has instructions for it. Softmax and loss are f32 in any case."),
    key("train.recompute", Choice(&["none", "attention", "all"]), Value("\"none\""), Free, "Sub-layers whose forward is computed again in the backward, in place of keeping its results: saves memory, costs time, changes no bit."),
    key("train.memory_limit_mib", Integer { min: 1, max: ANY }, Absent("what the system gives"), Free, "MiB that a rank may take. A run that would take more (or that the system refuses memory) halves its micro-batch until it fits, says so, and records it; the global batch stays."),
    key("train.deterministic", Choice(&["run", "layout"]), Value("\"run\""), REGROUPED, "What the same bits are promised for. `run`: the same recipe on the same ranks. `layout`: any number of ranks, any `ep`, any micro-batch (not `cp`): gradients are summed over a fixed tree of sequences, one sequence at a time, which is slow and takes memory for several sets of gradients."),
    key("train.threads", Integer { min: 1, max: 65_536 }, Absent("all cores"), Free, "Threads of the CPU backend; the result does not depend on it. `--threads` goes before it."),
    key("train.gpu_graphs", Bool, Value("true"), Free, "Under `--backend hip`: micro-batches that launch the same kernels again are queued as one graph. Changes no bit; off while `--profile` records."),
    key("train.peak_flops", Number(Positive), Absent("measured at start"), Free, "FLOP/s that count as 100 % in the metric MFU."),

    key("optimizer.muon_momentum", Number(BelowOne), Value("0.95"), FROM_HERE, "Momentum of Muon (Nesterov form)."),
    key("optimizer.muon_weight_decay", Number(NotNegative), Value("0.1"), FROM_HERE, "Decoupled weight decay of Muon's matrices, times the learning rate."),
    key("optimizer.ns_steps", Integer { min: 1, max: 100 }, Value("5"), FROM_HERE, "Newton-Schulz iterations of Muon."),
    key("optimizer.muon_split_gate_up", Bool, Value("false"), MOMENTS, "Whether Muon treats an expert's gate and up halves as two matrices."),
    key("optimizer.adam_betas", Betas, Value("[0.9, 0.95]"), FROM_HERE, "Decay rates of AdamW's two moments."),
    key("optimizer.adam_eps", Number(Positive), Value("1e-8"), FROM_HERE, "Epsilon of AdamW."),
    key("optimizer.adam_weight_decay", Number(NotNegative), Value("0.0"), FROM_HERE, "Decoupled weight decay of AdamW's parameters, times the learning rate."),
    key("optimizer.clip", Number(NotNegative), Value("1.0"), FROM_HERE, "Largest global gradient norm; longer gradients are scaled down to it. 0 = never."),
    key("optimizer.expert_clip", Number(NotNegative), Value("0.0"), FROM_HERE, "Largest norm of the gradient of one expert's weights, `gate_up` and `down` of one block together; longer ones are scaled down to it before the global norm is clipped. 0 = never."),

    key("schedule.kind", Choice(SCHEDULES), Value("\"cosine\""), NEW_CURVE, "Shape after the linear warm-up. `cosine` and `linear` fall from `lr` to `min_lr` over the rest of the run; `constant` stays; `wsd` (warm-up, stable, decay) stays and falls linearly over the last `decay_steps`."),
    key("schedule.lr", Number(Positive), Value("6e-4"), NEW_CURVE, "Highest learning rate, of Muon and AdamW alike. The default is that of ZAYA1's first stage; small models want more."),
    key("schedule.min_lr", Number(NotNegative), Value("0.0"), NEW_CURVE, "Learning rate at the end; at most `lr`. `constant` does not use it."),
    key("schedule.warmup_steps", Integer { min: 0, max: ANY }, Absent("from `warmup_tokens`, else 0"), NEW_CURVE, "Steps of linear warm-up. May be longer than the run (with a warning)."),
    key("schedule.warmup_tokens", Tokens { min: 0 }, Absent("from `warmup_steps`"), NEW_CURVE, "The same in tokens, rounded up to whole steps. Give at most one of the two."),
    key("schedule.decay_steps", Integer { min: 0, max: ANY }, Absent("needed by `wsd`, unused by the others"), NEW_CURVE, "Steps of the decay of `wsd`."),

    key("router.balance", Choice(&["adamw", "sign", "pid"]), Value("\"adamw\""), MOMENTS, "Controller that moves the balancing biases, fed once per step with p_e - 1/E over the global batch: AdamW; a fixed step against the sign; or a PID controller."),
    key("router.balance_lr", Number(NotNegative), Value("0.001"), FROM_HERE, "Step of `adamw` and `sign`, in units of router probability."),
    key("router.balance_betas", Betas, Value("[0.9, 0.999]"), FROM_HERE, "Decay rates of the moments of `adamw`."),
    key("router.balance_eps", Number(Positive), Value("1e-8"), FROM_HERE, "Epsilon of `adamw`."),
    key("router.pid_proportional", Number(NotNegative), Value("0.1"), FROM_HERE, "Gain of `pid` on the error."),
    key("router.pid_integral", Number(NotNegative), Value("0.01"), FROM_HERE, "Gain of `pid` on the sum of errors."),
    key("router.pid_derivative", Number(NotNegative), Value("0.0"), FROM_HERE, "Gain of `pid` on the error's change per step."),
    key("router.balance_warmup", Integer { min: 0, max: ANY }, Value("0"), FROM_HERE, "Steps over which the controller's gain rises linearly from 0 to its value."),
    key("router.balance_skip_class", Bool, Value("false"), FROM_HERE, "Whether the skip class is balanced as one more expert; else its bias stays."),
    key("router.freeze_tokens", Tokens { min: 0 }, Value("0"), FROM_HERE, "Tokens at the start of the run during which the routers' weights do not move."),

    key("checkpoint.every", Integer { min: 1, max: ANY }, Value("1000"), Free, "Steps between checkpoints; one more is written at the end."),
    key("checkpoint.async", Bool, Value("true"), Free, "Whether training goes on while a checkpoint is written, from a copy of the state that is kept in memory (`--dry-run` shows its size). The one at the end is waited for."),
    key("checkpoint.keep_last", Integer { min: 1, max: ANY }, Absent("all are kept"), Free, "Newest checkpoints that are kept."),
    key("checkpoint.keep_every", Integer { min: 1, max: ANY }, Absent("no step is special"), Free, "Checkpoints of steps that are multiples of this are kept whatever `keep_last` says."),
    key("checkpoint.incremental", Bool, Value("false"), Free, "Whether files whose content did not change since an earlier checkpoint (a frozen router, a save that is tried again) are taken from a pool, `ckpt/objects`, in place of being written again (docs/CHECKPOINT.md). Needs a file system with hard links."),
    key("checkpoint.upload", Text, Absent("nothing is uploaded"), Free, "Object store that checkpoints are uploaded to in the background, as a URL: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, or `file:///FOLDER` for a mirror. Credentials and endpoints come from the environment (docs/CHECKPOINT.md). `--resume` fetches the newest checkpoint from there when the run directory holds none."),
    key("checkpoint.upload_retry", Duration, Value("\"3m\""), Free, "How long a request to the store that fails is tried again before the upload counts as failed; the next checkpoint tries again."),

    key("guards.non_finite", Choice(&["stop", "skip", "rollback"]), Value("\"stop\""), Free, "What becomes of a batch whose loss or gradient is not a finite number on some rank: the run ends, the batch is passed over, or the run goes back to its last checkpoint and passes over all batches since (docs/GUARDS.md)."),
    key("guards.spike", Choice(&["off", "tell", "stop", "skip", "rollback"]), Value("\"off\""), Free, "The same of a batch whose loss or gradient norm stands out from the last steps. `tell` applies it, and says so; `off` does not judge."),
    key("guards.spike_window", Integer { min: 8, max: 1_000_000 }, Value("128"), Free, "Accepted steps that a step is compared with, once half of them are there."),
    key("guards.spike_threshold", Number(Positive), Value("6.0"), Free, "Robust standard deviations (from the median absolute deviation, at least 1 % of the median) above the median from which on a step stands out."),
    key("guards.limit", Integer { min: 0, max: ANY }, Value("10"), Free, "Batches that may be refused without `spike_window` accepted steps in a row between them; one more ends the run."),
    key("guards.skip_batches", Batches, Value("[]"), Free, "Batches that are passed over without being looked at, by their number in the run, counted from 0: numbers, and pairs of a first and a last one, such as `[17, [40, 44]]`."),

    key("eval.every", Integer { min: 1, max: ANY }, Absent("never"), Free, "Steps between evaluations on `data.validation`, and of `eval.tasks` that say nothing else; one more follows the last step."),
    key("eval.tokens", Tokens { min: 1 }, Absent("the whole set"), Free, "Tokens of each held-out set that are used, rounded down to whole sequences."),
    key("eval.tasks.*.task", Text, Required, Free, "A benchmark task or group, named as for `zaya eval --tasks` ([EVAL.md](EVAL.md)); needs `tokenizer.path`."),
    key("eval.tasks.*.data", Path, Required, Free, "Folder that holds the task's data files."),
    key("eval.tasks.*.every", Integer { min: 1, max: ANY }, Absent("`eval.every`, else only the last step"), Free, "Steps between runs of the task; one more follows the last step."),
    key("eval.tasks.*.num_fewshot", Integer { min: 0, max: 10_000 }, Absent("the task's own"), Free, "Worked examples before each document."),
    key("eval.tasks.*.limit", Integer { min: 1, max: ANY }, Absent("all documents"), Free, "First documents of each task that are asked."),

    key("metrics.every", Integer { min: 1, max: ANY }, Value("1"), Free, "Steps between lines of `metrics.jsonl`."),

    key("parallel.cp", Integer { min: 1, max: 65_536 }, Value("1"), REGROUPED, "Context parallelism: ranks that share each sequence. Divides the number of ranks."),
    key("parallel.ep", Integer { min: 1, max: 65_536 }, Value("1"), REGROUPED, "Expert parallelism: ranks that share the experts of each block, whatever `cp` is. Divides the number of ranks; at most `model.num_experts`."),
    key("parallel.cp_chunks", Choice(&["auto", "contiguous", "zigzag"]), Value("\"auto\""), REGROUPED, "How a sequence is cut among the ranks of a context group: in `cp` chunks, one a rank; or in `2 cp`, of which rank r holds r and `2 cp - 1 - r`, so that all have as many keys to look at. `auto`: zigzag from 32,768 tokens on."),
    key("parallel.collectives", Choice(&["auto", "flat", "two-stage"]), Value("\"auto\""), Free, "Whether ranks talk to all others directly, or first inside each node and then, across nodes, to those with their own place in their node. `auto`: two-stage where a group has several ranks on each of several nodes. Both give the same bits where the number of ranks in a node is a power of two."),
    key("parallel.ranks_per_node", Integer { min: 1, max: 65_536 }, Absent("the launcher's, else all ranks"), Free, "Ranks of a node, which have numbers in a row."),
    key("parallel.partial_nodes", Choice(&["warn", "error", "allow"]), Value("\"warn\""), Free, "What becomes of a context or expert group that is a part of a node, or lies across a node's border: such a group uses few of the links between the GPUs of a node."),
    key("parallel.bucket_mib", IntegerOrAuto { min: 1, max: 65_536 }, Value("16"), Free, "MiB of gradients (or updated weights) that travel together. `\"auto\"`: the size of 1, 4, 16 and 64 that `zaya bench collectives` would recommend, measured between the ranks when the run starts, in about a second. Changes no bit."),
    key("parallel.timeout", Duration, Value("\"10m\""), Free, "How long a rank waits for another before the run ends with a sentence that names who is missing."),

    key("stages.*.name", Text, Required, STAGE, "Name of the stage; unique."),
    key("stages.*.steps", Integer { min: 1, max: ANY }, Absent("`train.steps`"), STAGE, "As `train.steps`, for this stage."),
    key("stages.*.tokens", Tokens { min: 1 }, Absent("`train.tokens`"), STAGE, "As `train.tokens`, for this stage."),
    key("stages.*.global_batch_tokens", Tokens { min: 1 }, Absent("`train.global_batch_tokens`"), STAGE, "As `train.global_batch_tokens`."),
    key("stages.*.micro_batch", Integer { min: 1, max: i32::MAX as u64 }, Absent("`train.micro_batch`"), STAGE, "As `train.micro_batch`."),
    key("stages.*.recompute", Choice(&["none", "attention", "all"]), Absent("`train.recompute`"), Free, "As `train.recompute`."),
    key("stages.*.seq_len", Length, Absent("`train.seq_len`"), STAGE, "As `train.seq_len`."),
    key("stages.*.rope_theta", Number(Positive), Absent("`model.rope_theta`"), STAGE, "As `model.rope_theta`."),
    key("stages.*.rope_theta_sliding", Number(Positive), Absent("`model.rope_theta_sliding`"), STAGE, "As `model.rope_theta_sliding`."),
    key("stages.*.kind", Choice(SCHEDULES), Absent("`schedule.kind`"), STAGE, "As `schedule.kind`; a stage's curve spans the stage."),
    key("stages.*.lr", Number(Positive), Absent("`schedule.lr`"), STAGE, "As `schedule.lr`."),
    key("stages.*.min_lr", Number(NotNegative), Absent("`schedule.min_lr`"), STAGE, "As `schedule.min_lr`."),
    key("stages.*.warmup_steps", Integer { min: 0, max: ANY }, Absent("`schedule.warmup_steps`"), STAGE, "As `schedule.warmup_steps`, from the stage's first step."),
    key("stages.*.warmup_tokens", Tokens { min: 0 }, Absent("`schedule.warmup_tokens`"), STAGE, "As `schedule.warmup_tokens`."),
    key("stages.*.decay_steps", Integer { min: 0, max: ANY }, Absent("`schedule.decay_steps`"), STAGE, "As `schedule.decay_steps`."),
    key("stages.*.cp", Integer { min: 1, max: 65_536 }, Absent("`parallel.cp`"), REGROUPED, "As `parallel.cp`."),
    key("stages.*.ep", Integer { min: 1, max: 65_536 }, Absent("`parallel.ep`"), REGROUPED, "As `parallel.ep`."),
    key("stages.*.weights", Weights, Absent("`data.sources.*.weight`"), NEW_SHARES, "Weights of the sources by name, every source named: `{ web = 0.7, code = 0.3 }`."),
];
