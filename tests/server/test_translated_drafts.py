"""`specoffload serve` with a draft model of another tokenizer, without a flag for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from program import serving
from resolved import config_of
from running import http
from vocabularies import CYCLE, write

from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session

PROMPT = CYCLE + " quick"
PLAIN = GenerateOptions(n_predict=24, temperature=0.0)
ASKED: list[tuple[dict[str, Any], GenerateOptions]] = [
    ({}, PLAIN),
    ({"max_tokens": 3}, replace(PLAIN, n_predict=3)),
    ({"grammar": (g := 'root ::= "fjord" [-a-z]+ ":"')}, replace(PLAIN, grammar=g)),
    ({"stop": ["nymph"]}, replace(PLAIN, stop=("nymph",))),
]


def test_four_requests_at_once_get_the_texts_of_plain_decoding(tmp_path: Path) -> None:
    model, draft = write(tmp_path / "m.gguf", "qwen2"), write(tmp_path / "d.gguf", "spm")
    bodies = [{"prompt": PROMPT, "max_tokens": 24, "temperature": 0} | body for body, _ in ASKED]
    with (
        serving("-m", str(model), "--draft", str(draft), "--device", "cpu", "-np", "4") as program,
        ThreadPoolExecutor(4) as pool,
    ):
        url = program.url + "/v1/completions"
        answers = list(pool.map(lambda body: http.post(url, json=body).json(), bodies))
        notes = http.get(program.url + "/props").text
    assert "drafts of d.gguf are translated through text" in notes
    assert answers[0]["timings"]["draft_n_accepted"] > 0
    config = config_of(model=model, device="cpu", spec_given={"--spec-type": "none"})
    with Session(config) as plain:
        prompt = plain.tokenize(PROMPT, add_special=True, parse_special=False)
        for answer, (_, options) in zip(answers, ASKED, strict=True):
            wanted = "".join(piece.text for piece in plain.generate(prompt, options))
            assert answer["choices"][0]["text"] == wanted != ""
