"""The server under more clients than the queue has places, and a client that asks too often."""

from __future__ import annotations

import asyncio

import httpx
from fake_generator import FakeFactory
from running import StartServer, http

from lab.attack.client import overload
from specoffload.server.access import AccessRules

N_TOKENS = 2  # tokens of 20 ms each, so that Retry-After, in whole seconds, is realistic


def test_more_clients_than_places_all_get_their_own_answers(start_server: StartServer) -> None:
    """test_turns.py tests how equally clients are served, without a clock."""
    server = start_server(FakeFactory(n_parallel=4), max_queue=16)
    port = httpx.URL(server.url).port
    assert port is not None
    texts = {f"{n}[slow]": f"{n}[" for n in range(9)}
    found = asyncio.run(overload(port, texts, N_TOKENS, n_clients=64, n_answers=128))
    assert found.wrong == []
    assert found.n_refused > 0
    assert all(1 <= after_s <= 60 for after_s in found.retry_after_s)
    props = server.props()
    assert (props["requests_processing"], props["requests_deferred"]) == (0, 0)


def test_a_client_of_many_requests_does_not_keep_out_one_with_another_key(
    start_server: StartServer,
) -> None:
    """Six requests of one key wait. A later request of another key is served after the first of
    them."""
    server = start_server(access=AccessRules(keys=("many", "one")))
    done: list[str] = []

    async def ask(client: httpx.AsyncClient, key: str) -> None:
        body = {"prompt": "[slow]", "max_tokens": 4}
        headers = {"Authorization": f"Bearer {key}"}
        answer = await client.post(server.url + "/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        done.append(key)

    def n_deferred() -> int:
        props = http.get(server.url + "/props", headers={"X-Api-Key": "one"}).json()
        return int(props["requests_deferred"])

    async def all_of_them() -> None:
        async with httpx.AsyncClient(verify=False, timeout=60) as client:
            body = {"prompt": "[forever]", "stream": True}
            headers = {"X-Api-Key": "many"}
            url = server.url + "/v1/completions"
            async with client.stream("POST", url, json=body, headers=headers):
                asked = [asyncio.ensure_future(ask(client, "many")) for _ in range(6)]
                while await asyncio.to_thread(n_deferred) < 6:
                    await asyncio.sleep(0.02)
                asked.append(asyncio.ensure_future(ask(client, "one")))
                while await asyncio.to_thread(n_deferred) < 7:
                    await asyncio.sleep(0.02)
            await asyncio.gather(*asked)

    asyncio.run(all_of_them())
    assert len(done) == 7
    assert done.index("one") <= 1
