"""Equal requests get equal answers, though drafts are verified in batches of several tokens."""

from __future__ import annotations

from program import Program
from running import http

N_REQUESTS = 20


def test_twenty_identical_requests_with_drafts_get_one_text(pair: Program) -> None:
    """It was reported that texts of equal requests differ after about ten of them."""
    body = {"input": "def partition(values, low, high):", "temperature": 0, "max_output_tokens": 60}
    texts = []
    for _ in range(N_REQUESTS):
        answer = http.post(pair.url + "/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        (item,) = answer.json()["output"]
        texts.append(item["content"][0]["text"])
    assert len(texts[0]) > 50
    assert texts == [texts[0]] * N_REQUESTS
    prompt = {"prompt": "def partition(values, low, high):", "n_predict": 30, "temperature": 0}
    timings = http.post(pair.url + "/completion", json=prompt).json()["timings"]
    assert timings["draft_n"] > 0, "this server drafts"
