"""Clients of other people choose among several models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_generator import FakeFactory
from running import RunningModels


@pytest.fixture(scope="module")
def models() -> Iterator[RunningModels]:
    running = RunningModels({name: FakeFactory(name=name) for name in ("one", "two")})
    yield running
    running.stop()


@pytest.mark.extra("anthropic")
def test_anthropics_client_chooses_and_hears_of_unknown_models(models: RunningModels) -> None:
    import anthropic

    asked: list[Any] = [{"role": "user", "content": "[say]yes[/say]"}]
    with anthropic.Anthropic(base_url=models.url, api_key="none", max_retries=0) as client:
        for name in ("one", "two", "one"):
            message = client.messages.create(model=name, max_tokens=99, messages=asked)
            assert message.model == name
            with client.messages.stream(model=name, max_tokens=99, messages=asked) as stream:
                assert "".join(stream.text_stream).startswith("yes")
        assert [model.id for model in client.models.list()] == ["one", "two"]
        with pytest.raises(anthropic.NotFoundError, match="model 'three' not found"):
            client.messages.create(model="three", max_tokens=9, messages=asked)


@pytest.mark.extra("litellm")
@pytest.mark.filterwarnings("ignore:Item 'summary':UserWarning")  # pydantic's, of its own types
def test_litellm_chooses_a_model(models: RunningModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    for name in ("two", "one"):
        options: dict[str, Any] = {
            "model": f"openai/{name}",
            "api_base": models.url + "/v1",
            "api_key": "none",
            "messages": [{"role": "user", "content": "[say]yes[/say]"}],
            "max_retries": 0,
        }
        answer = litellm.completion(**options)
        assert answer.model == name
        assert answer.choices[0].message.content.startswith("yes")
        rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**options, stream=True)))
        assert rebuilt.choices[0].message.content.startswith("yes")
