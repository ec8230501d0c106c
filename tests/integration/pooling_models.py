"""Tiny encoders with random weights: models whose attention is bidirectional, and which have no KV cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.tinymodel import ensure_generated

CONTEXT = 512
_SEED = 20240607
_TEXT = (
    "A request is its token ids; the KV cache of a request is only a cache. "
    "Blocks move between replicas while the request keeps decoding, and the stream never breaks. "
)


def ensure_encoder() -> Path:
    """The folder of a model that embeds texts."""
    return ensure_generated("tiny-bert-v1", lambda folder: _make(folder, lambda config: _classes().BertModel(config)))


def ensure_reranker() -> Path:
    """The folder of a cross-encoder, which scores a document for a query."""

    def made(config: Any) -> Any:
        config.num_labels = 1
        return _classes().BertForSequenceClassification(config)

    return ensure_generated("tiny-reranker-v1", lambda folder: _make(folder, made))


def _classes() -> Any:
    import transformers

    return transformers


def _make(folder: Path, model: Callable[[Any], Any]) -> None:
    import torch

    vocabulary = _make_tokenizer(folder)
    config = _classes().BertConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=CONTEXT,
        initializer_range=0.12,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        made = model(config)
    made.eval().to(torch.float32).save_pretrained(folder)


def _make_tokenizer(folder: Path) -> int:
    """Make the tokenizer. Returns the size of its vocabulary."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=marks, show_progress=False)
    tokenizer.train_from_iterator([_TEXT] * 8, trainer)
    begin, end = (tokenizer.token_to_id(mark) for mark in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", begin), ("[SEP]", end)],
    )
    fast = _classes().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    fast.model_max_length = CONTEXT
    fast.save_pretrained(folder)
    return len(fast)
