"""Two replicas behind SGLang's router: a conversation's next turn finds its kept prompt."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from program import Program, serving
from running import eventually, http

pytestmark = pytest.mark.extra("sglang_router")

N_CONVERSATIONS = 16
N_USERS = 4  # users at the same time
WORDS = (
    "list",
    "numbers",
    "function",
    "returns",
    "value",
    "sum",
    "file",
    "path",
    "string",
    "class",
)


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Program]]:
    flags = ("--device", "cpu", "--ctx-size", "8192", "--metrics")
    with serving(*flags) as first, serving(*flags) as second:
        yield [first, second]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def routing(replicas: list[Program], policy: str) -> Iterator[str]:
    """Run the router over the replicas. Yields its address."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router"]
    command += ["--worker-urls", *(replica.url for replica in replicas)]
    command += ["--policy", policy, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--worker-startup-check-interval", "1", "--log-level", "warn"]
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, "the router ended"
        try:
            workers = http.get(url + "/workers").json()["workers"]
        except httpx.HTTPError:
            return False
        return sum(worker["is_healthy"] for worker in workers) == len(replicas)

    with subprocess.Popen(command) as process:
        try:
            eventually(is_ready, 60)
            yield url
        finally:
            process.kill()
            process.wait(30)


def answer(url: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    asked = {"model": "any", "max_tokens": 16, "messages": messages}
    response = http.post(url + "/v1/chat/completions", json=asked)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def n_answers(replica: Program) -> int:
    lines = http.get(replica.url + "/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith("specoffload:answers_total")]
    return int(float(line.split()[1]))


def kept_share(url: str, seed: int) -> float:
    """Return the share of prompt tokens in conversations' second turns that were kept.

    Second turns come in another order than first turns.
    """
    rng = random.Random(seed)
    conversations = [
        [{"role": "user", "content": " ".join(rng.choices(WORDS, k=150))}]
        for _ in range(N_CONVERSATIONS)
    ]
    # The router sends new prompts to the replica with fewer running requests.
    with ThreadPoolExecutor(N_USERS) as users:
        for messages, told in zip(
            conversations, users.map(partial(answer, url), conversations), strict=True
        ):
            messages.append(told["choices"][0]["message"])
            messages.append({"role": "user", "content": f"And with {rng.choice(WORDS)}?"})
        rng.shuffle(conversations)
        usages = [told["usage"] for told in users.map(partial(answer, url), conversations)]
    n_kept = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return n_kept / sum(int(usage["prompt_tokens"]) for usage in usages)


def test_a_second_turn_finds_its_prompt_kept(replicas: list[Program]) -> None:
    shares = {}
    for seed, policy in enumerate(("cache_aware", "round_robin")):
        before = [n_answers(replica) for replica in replicas]
        with routing(replicas, policy) as url:
            shares[policy] = kept_share(url, seed)
        new = [n_answers(replica) - n for replica, n in zip(replicas, before, strict=True)]
        assert sum(new) == 2 * N_CONVERSATIONS
        assert min(new) >= N_CONVERSATIONS // 2, f"{policy}: both replicas work"
    told = ", ".join(f"{policy} {share:.1%}" for policy, share in shares.items())
    print(f"kept tokens in second turns' prompts: {told}")
    assert shares["cache_aware"] >= 0.9
    assert shares["round_robin"] < 0.9


def test_the_router_names_the_model_and_passes_streams_on(replicas: list[Program]) -> None:
    [name] = [model["id"] for model in http.get(replicas[0].url + "/v1/models").json()["data"]]
    with routing(replicas, "cache_aware") as url:
        [told] = [model["id"] for model in http.get(url + "/v1/models").json()["data"]]
        assert told == name
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            asked = {"model": name, "prompt": "def area(", "max_tokens": 8}
            whole = client.completions.create(**asked).choices[0].text
            chunks = list(client.completions.create(**asked, stream=True))
        assert len(chunks) > 2
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole


def test_requests_of_a_dead_replica_go_to_the_other(replicas: list[Program]) -> None:
    """This test comes last, because it ends a replica."""
    with routing(replicas, "round_robin") as url:
        replicas[0].process.kill()
        for _ in range(4):
            assert answer(url, [{"role": "user", "content": "def area("}])["choices"]
