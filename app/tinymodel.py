"""A tiny Llama and its tokenizer, made locally and deterministically: Mell runs where there is no model hub.

The weights are random, with a standard deviation that keeps greedy output diverse (with the usual 0.02 it
collapses to one repeated token, and a comparison of outputs would prove nothing). The text it writes is noise.
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

VERSION = 2
"""Raised when what is made changes, so that a cached model of another version is never used."""

VOCAB_SIZE = 512
CONTEXT = 4096
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_SEED = 20240607
_CORPUS = (
    "A request is its token ids; the KV cache of a request is only a cache. "
    "Blocks move between replicas while the request keeps decoding, and the stream never breaks. "
    "The scheduler packs requests onto as few GPUs as hold them, and closes the replica that is empty. "
) * 8


def cache_root() -> Path:
    """Where made models are kept: $MELL_CACHE, else the user's cache folder."""
    return Path(os.environ.get("MELL_CACHE") or Path.home() / ".cache" / "mell")


def ensure_tiny_model() -> Path:
    """The folder of the tiny model; made on the first call (a few seconds), found on later ones.

    Concurrent callers are safe: each makes its own copy, the first to finish is kept.
    """
    folder = cache_root() / f"tiny-llama-v{VERSION}"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".tiny-"))
    try:
        _make_tokenizer(made)
        _make_weights(made)
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def digest(folder: Path) -> str:
    """SHA-256 over the model's files, in name order."""
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        total.update(path.name.encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    # The corpus is too small for 512 merges: unused ids are filled up so that every sampled id has a text.
    missing = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f" w{i}" for i in range(missing)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.model_max_length = CONTEXT
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _make_weights(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model = LlamaForCausalLM(config)
    model.eval().to(torch.float32).save_pretrained(folder)
