"""What a wrong name was meant to be: misspelt, in another group, or as other trainers call it. Free of jax."""

import difflib
from collections.abc import Iterable

_BATCH = "global_batch_size batch_size train_batch_size per_device_train_batch_size batch bs"
_STEPS = "max_steps num_steps total_steps train_steps training_steps max_iters train_iters iterations num_updates"
_WIDTH = "hidden_size n_embd embed_dim dim model_dim"
_CHECKPOINTING = "gradient_checkpointing activation_checkpointing use_gradient_checkpointing checkpoint_activations"

_ELSEWHERE = {
    # size and place of the batch, length of the run
    "train.global_batch": _BATCH,
    "train.steps": f"{_STEPS} epochs num_epochs num_train_epochs max_epochs train_epochs",
    "parallel.accumulation": "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches "
    "grad_accum_steps",
    "parallel.microbatches": "num_microbatches micro_batch_size microbatch_size pipeline_microbatches",
    "train.seed": "random_seed random_state data_seed",
    "resume": "resume_from_checkpoint resume_training auto_resume load_checkpoint",
    # the mesh
    "mesh dp=N": "dp data_parallel data_parallel_size ddp num_gpus nproc_per_node num_nodes nnodes num_devices "
    "data_parallel_replicate_degree",
    "mesh tp=N": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size model_parallel_size "
    "tensor_parallel_degree",
    "mesh pp=N": "pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree "
    "num_pipeline_stages",
    "zero 3": "fsdp full_shard fully_shard fsdp_size fsdp_parallel_size data_parallel_shard_degree",
    "zero": "zero_stage zero_optimization deepspeed use_distributed_optimizer",
    "fake_devices": "host_device_count num_cpu_devices cpu_devices",
    "devices": "device accelerator platform backend",
    # memory and arithmetic
    "parallel.remat full": f"{_CHECKPOINTING} recompute_activations recompute_granularity checkpointing",
    "train.precision": "mixed_precision dtype torch_dtype param_dtype compute_dtype",
    "train.precision bf16": "bf16 bfloat16",
    "train.precision fp16": "fp16 float16 half amp",
    "train.precision fp32": "fp32 float32",
    "parallel.offload optimizer": "offload_optimizer cpu_offload optimizer_cpu_offload",
    "model.attention": "attn_implementation flash_attention use_flash_attn",
    # the model
    "model.preset": "model_name_or_path model_name model_size model_id pretrained_model_name_or_path flavor",
    "model.family": "model_type architecture",
    "model.n_layers": "num_layers n_layer num_hidden_layers depth",
    "model.d_model": _WIDTH,
    "model.n_heads": "num_attention_heads n_head num_heads",
    "model.n_kv_heads": "num_key_value_heads num_kv_heads num_query_groups",
    "model.d_ff": "intermediate_size ffn_hidden_size mlp_dim ffn_dim n_inner",
    "model.max_seq_len": "max_position_embeddings n_positions",
    "model.tie_embeddings": "tie_word_embeddings tie_weights weight_tying",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon",
    "model.dropout": "hidden_dropout attention_dropout resid_pdrop",
    # the data
    "data.path": "dataset dataset_name dataset_path train_file train_data data_path data_dir train_files",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "data.seq_len": "max_seq_length max_length sequence_length seq_length context_length block_size context_window",
    "data.pack": "packing sequence_packing sample_packing",
    "data.eval_fraction": "val_fraction validation_split validation_split_percentage val_split test_size",
    # the optimizer
    "optim.name": "optimizer optim optimizer_name optimizer_type",
    "optim.lr": "learning_rate max_lr peak_lr base_lr",
    "optim.schedule": "lr_scheduler_type lr_scheduler lr_schedule lr_decay_style scheduler",
    "optim.warmup_steps": "warmup num_warmup_steps warmup_iters lr_warmup_iters warmup_ratio warmup_updates",
    "optim.final_lr_fraction": "min_lr min_lr_ratio final_lr",
    "optim.weight_decay": "wd decay",
    "optim.beta1": "adam_beta1 momentum",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon adam_eps epsilon",
    "optim.clip": "max_grad_norm grad_clip clip_grad gradient_clip_val gradient_clipping max_norm",
    # what is written and when
    "output": "output_dir out_dir save_dir checkpoint_dir log_dir logdir run_name experiment_name",
    "checkpoint.every": "save_steps save_interval save_every save_freq checkpoint_interval checkpointing_steps",
    "checkpoint.keep": "save_total_limit keep_last_n max_to_keep",
    "log.every": "logging_steps log_interval log_every log_freq log_steps",
    "log.wandb": "wandb_project report_to",
    "log.tensorboard": "tensorboard_dir use_tensorboard enable_tensorboard",
    "eval.every": "eval_steps eval_interval eval_every eval_freq val_check_interval",
    "eval.batches": "eval_iters eval_batches max_eval_batches limit_val_batches",
    # generated text
    "max_new_tokens": "max_tokens num_tokens max_gen_len",
    "samples": "num_samples num_return_sequences",
}
"""What an option is called here, with the value that it takes where the other name says one -> what others call it."""

SYNONYMS = {name: target for target, names in _ELSEWHERE.items() for name in names.split()}
"""What other trainers call an option -> what it is called here, perhaps with a value: "mesh tp=N"."""


def suggest(name: str, names: Iterable[str], dashes: str = "") -> str:
    """Returns " (did you mean 'optim.lr'?)" for the names closest to a wrong one, or "".

    Another group's name or another trainer's comes first, written just so; then what looks alike: within its own group
    (`train.step` is `train.steps`), and then anywhere, other trainers' names included.

    Args:
        name: that does not exist.
        names: that do, dotted.
        dashes: what stands before a name: "--" on a command line; "" in YAML, where a value follows a colon.
    """
    names = list(names)
    name = name.replace("-", "_")
    group, _, leaf = name.rpartition(".")
    within = {other.rpartition(".")[2]: other for other in names if other.rpartition(".")[0] == group}
    meant = {alias: target for alias, target in SYNONYMS.items() if target.partition(" ")[0] in names}
    alike = {other.rpartition(".")[2]: other for other in names} | meant | {other: other for other in names}
    found = [other for other in names if other.rpartition(".")[2] == leaf]
    found = found or [target for alias, target in meant.items() if _squashed(alias) == _squashed(leaf)][:1]
    found = found or [within[close] for close in difflib.get_close_matches(leaf, within, n=1, cutoff=0.7)]
    found = found or [alike[close] for close in _closest([name.lower(), leaf.lower()], alike)]
    quoted = [repr(dashes + (each if dashes else each.replace(" ", ": "))) for each in found]
    return f" (did you mean {' or '.join(filter(None, [', '.join(quoted[:-1]), quoted[-1]]))}?)" if quoted else ""


def _squashed(name: str) -> str:
    """batch_size, batchSize and BatchSize alike."""
    return name.replace("_", "").lower()


def _closest(texts: list[str], valid: Iterable[str]) -> list[str]:
    """The one of `valid` that is most like one of the texts; [] where none is like them."""
    scored = [
        (difflib.SequenceMatcher(None, close, text).ratio(), close)
        for text in texts
        for close in difflib.get_close_matches(text, list(valid), n=1, cutoff=0.7)
    ]
    return [max(scored)[1]] if scored else []
