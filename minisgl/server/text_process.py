"""A process that tokenizes, detokenizes, or both: how it is started. The work is in minisgl.tokenizer.worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minisgl.addresses import Addresses

from .process import Reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """What one process does: it is tokenizer worker ``tokenizer`` (None: it does not tokenize), detokenizes, or both."""

    model_path: Path
    addresses: Addresses
    tokenizer: int | None
    detokenizer: bool
    max_seq_len: int | None = None


def run_text(config: TextConfig, reporter: Reporter) -> None:
    """Serves until SIGTERM. The detokenizer, of which there is one, also tells the model's sampling parameters."""
    reporter.progress("loading the tokenizer")
    from minisgl.core import ParameterError, SamplingParams
    from minisgl.models.config import ModelConfig
    from minisgl.tokenizer import generation_defaults
    from minisgl.tokenizer.worker import TokenizerWorkerConfig, tokenizer_worker

    if config.detokenizer:
        defaults = generation_defaults(config.model_path)
        try:
            SamplingParams(**defaults).validate()
        except ParameterError as error:
            raise ValueError(f"The model's generation_config.json recommends what cannot be served: {error}") from None
        reporter.tell(sampling_defaults=defaults)
    tokenizer_worker(
        TokenizerWorkerConfig(
            model=config.model_path,
            addresses=config.addresses,
            tokenizer=config.tokenizer,
            detokenizer=config.detokenizer,
            max_seq_len=config.max_seq_len or ModelConfig.from_path(config.model_path).max_position_embeddings,
        ),
        reporter,
    )
