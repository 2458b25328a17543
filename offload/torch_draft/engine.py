"""A torch draft with the vocabulary of its file: what a session takes in the place of an Engine."""

from __future__ import annotations

from pathlib import Path

from offload.ggml.library.callback import Pending
from offload.ggml.library.log import opening
from offload.ggml.llama import Model, ModelPlacement
from offload.model import ModelFacts
from offload.text import ModelText
from offload.torch_draft.draft import TorchDraft
from offload.torch_draft.options import TorchDraftOptions


class TorchEngine(ModelText):
    """Tokens are libllama's, which reads the file without its weights. Close it, or use `with`."""

    def __init__(self, path: str | Path, options: TorchDraftOptions | None = None) -> None:
        """Raises what TorchDraft raises, and BadModel for a file that libllama refuses."""
        self.options = options = options or TorchDraftOptions()
        self.sequences = TorchDraft(path, options)
        self.facts: ModelFacts = self.sequences.facts
        try:
            with opening(self.facts.path):
                counted = ModelPlacement(no_alloc=True, load_mode="none")
                self._model = Model(self.facts.path, counted, Pending())
        except BaseException:
            self.sequences.close()
            raise

    @property
    def n_vocab(self) -> int:
        """Of the file: drafts may be of fewer tokens."""
        return self._model.n_vocab

    @property
    def n_ctx(self) -> int:
        """Tokens that one sequence can hold."""
        return self.sequences.n_ctx

    def close(self) -> None:
        """Give all of it back; safe to call twice."""
        self.sequences.close()
        self._model.close()

    def __enter__(self) -> TorchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
