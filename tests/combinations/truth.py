"""What a model answers if it is asked the plain way: alone, on the CPU, without drafts or cache."""

from __future__ import annotations

from pathlib import Path

from combinations.asking import Reply
from combinations.judge import Answer, Judge
from offload.engine import Engine
from specoffload.generation.generation import GenerateOptions

CACHE_WORDS = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
# Largest distance of logits between two batches of the same text, as a share of their standard
# deviation. The embedded models have weights of type Q8_0, whose products round.
_NOISE = 0.1


class Truth:
    """The plain answers of one model, with temperature 0. Each is computed once."""

    def __init__(self, model: Path, n_ctx: int) -> None:
        self.n_ctx = n_ctx
        self._judge = Judge(model, CACHE_WORDS, n_ctx, is_exact=False)
        self._answers: dict[tuple[tuple[int, ...], int], Answer] = {}

    def close(self) -> None:
        self._judge.close()

    def tokens(self, text: str) -> list[int]:
        """The tokens of a prompt's text."""
        target: Engine = self._judge.session.target
        return target.tokenize(text, add_special=True, parse_special=True)

    def plain(self, prompt: list[int], n_predict: int) -> Answer:
        """The answer to a prompt of tokens."""
        key = (tuple(prompt), n_predict)
        if key not in self._answers:
            options = GenerateOptions(n_predict=n_predict, temperature=0)
            self._answers[key] = self._judge.plain(prompt, options)
        return self._answers[key]

    def fault_of(self, prompt: list[int], n_predict: int, reply: Reply) -> str:
        """Why `reply` is not the plain answer, or an empty text."""
        if reply.n_prompt != len(prompt):
            return f"{reply.n_prompt} tokens of the prompt are counted, it has {len(prompt)}"
        plain = self.plain(prompt, n_predict)
        if reply.text != plain.text:
            return self._fault_of_text(plain, reply.text)
        if reply.n_answer != len(plain.tokens):
            return f"{reply.n_answer} tokens are counted, the answer has {len(plain.tokens)}"
        if (reply.reason == "length") != (plain.finish_reason == "length"):
            return f"it ends with {reply.reason!r} instead of {plain.finish_reason!r}"
        return ""

    def _fault_of_text(self, plain: Answer, text: str) -> str:
        """A difference is allowed where two tokens nearly tie."""
        model = self._judge.session.target.model
        known, at = b"", 0
        for token in plain.tokens:
            longer = known + model.piece(token, special=False)
            if not text.encode().startswith(longer):
                break
            known, at = longer, at + 1
        told = f"{text!r} instead of {plain.text!r}"
        if at == len(plain.tokens):
            return f"the answer is longer than the plain one: {told}"
        row = self._judge.row((*plain.prompt, *plain.tokens[:at]))
        best = plain.tokens[at]
        rest = text.encode()[len(known) :]
        for token in (row >= row[best] - _NOISE * float(row.std())).nonzero()[0].tolist():
            piece = model.piece(token, special=False)
            if token != best and (model.is_end(token) if not rest else rest.startswith(piece)):
                return ""
        return f"token {at} of the answer differs: {told}"


_TRUTHS: dict[tuple[Path, int], Truth] = {}


def truth_of(model: Path, n_ctx: int) -> Truth:
    """The truth about a model file. It stays open until `close_truths`."""
    key = (model, n_ctx)
    if key not in _TRUTHS:
        _TRUTHS[key] = Truth(model, n_ctx)
    return _TRUTHS[key]


def close_truths() -> None:
    """Close the models of all truths."""
    while _TRUTHS:
        _TRUTHS.popitem()[1].close()
