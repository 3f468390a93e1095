"""Bytes on disk to batches of token ids. Imports no jax."""

from jaxshard.data.dataset import Dataset, build, check_vocabulary, with_whole_paths
from jaxshard.data.fingerprint import Fingerprint
from jaxshard.data.loader import TrainLoader, eval_batches
from jaxshard.data.packing import Batch, Rows
from jaxshard.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Dataset",
    "Fingerprint",
    "Rows",
    "Tokenizer",
    "TrainLoader",
    "build",
    "check_vocabulary",
    "eval_batches",
    "load_tokenizer",
    "with_whole_paths",
]
