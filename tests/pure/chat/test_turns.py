"""Conversations in any order become ones that a template takes, and lose nothing on the way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from published import NAMES, WEATHER, chat_format

from specoffload.chat.conversation import Conversation
from specoffload.chat.messages import arguments_of, in_form
from specoffload.chat.needs import TemplateNeeds
from specoffload.chat.turns import NO_RESULT, TurnLimits, arranged, paired

ROLES = ("system", "user", "assistant", "call", "tool")


def user(text: str = "u") -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str = "s") -> dict[str, Any]:
    return {"role": "system", "content": text}


def answer(text: str = "a", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(*ids: str, content: str = "", arguments: str = "{}") -> dict[str, Any]:
    calls = [{"id": i, "function": {"name": "f", "arguments": arguments}} for i in ids]
    return answer(content, tool_calls=calls)


def result(call_id: str | None, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Messages in any order, each with a text of its own, and results of calls or of none."""
    found: list[dict[str, Any]] = []
    ids = ["a", "b", "c", "d"]
    for n, role in enumerate(draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=9))):
        text = f"<{n}>"
        if role == "call":
            some = draw(st.lists(st.sampled_from(ids), min_size=1, max_size=3, unique=True))
            found.append(call(*some, content=draw(st.sampled_from(["", text]))))
        elif role == "tool":
            found.append(result(draw(st.sampled_from([*ids, None])), text))
        else:
            found.append({"role": role, "content": text})
        if role in ("call", "assistant") and draw(st.booleans()):
            found[-1]["reasoning_content"] = f"<thought {n}>"
    return found


PAIRS = (
    ("user", "user"),
    ("answer", "answer"),
    ("answer", "call"),
    ("result", "user"),
    ("start", "answer"),
    ("start", "call"),
    ("call", "end"),
)
LIMITS = st.builds(
    TurnLimits,
    st.frozensets(st.sampled_from(PAIRS)),
    st.sampled_from(["anywhere", "first", "never"]),
    *[st.booleans()] * 5,
    needs_user=st.booleans(),
    filler=st.just("."),
)


def place(message: dict[str, Any]) -> str:
    if message.get("tool_calls"):
        return "call"
    return {"user": "user", "assistant": "answer", "tool": "result"}.get(message["role"], "system")


def violations(messages: list[dict[str, Any]], limits: TurnLimits) -> list[str]:
    """What in `messages` is not within `limits`."""
    places = ["start", *map(place, messages), "end"]
    if messages and messages[0]["role"] == "system":
        del places[0]
        places[0] = "start"
    found = [f"{a} before {b}" for a, b in zip(places, places[1:], strict=False)
             if (a, b) in limits.refused]  # fmt: skip
    if limits.system == "never" and "system" in map(place, messages):
        found.append("a system message")
    if limits.system == "first" and "system" in map(place, messages[1:]):
        found.append("a later system message")
    for message in messages:
        calls, content = message.get("tool_calls") or (), message["content"]
        reasons = bool(message.get("reasoning_content"))
        if len(calls) > 1 and not limits.several_calls:
            found.append("several calls")
        if calls and content and not limits.content_with_calls:
            found.append("content with calls")
        if calls and content and reasons and not limits.reasoning_with_both:
            found.append("reasoning with both")
    return found


def texts_of(messages: list[dict[str, Any]]) -> str:
    return " ".join(
        m["content"] + (m.get("reasoning_content") or "") for m in messages
    )  # fmt: skip


@given(conversations(), LIMITS)
def test_what_a_template_takes_is_kept_to_and_no_text_or_call_is_lost(
    messages: list[dict[str, Any]], limits: TurnLimits
) -> None:
    found = arranged(paired(messages), limits)
    assert violations(found, limits) == []
    told = texts_of(found)
    for message in messages:
        assert message["content"] in told
    n_calls = sum(len(m.get("tool_calls", ())) for m in messages)
    assert sum(len(m.get("tool_calls", ())) for m in found) == n_calls
    if limits.needs_user:
        assert any(m["role"] == "user" for m in found)


@given(conversations(), LIMITS)
def test_what_is_arranged_stays_as_it_is(
    messages: list[dict[str, Any]], limits: TurnLimits
) -> None:
    found = arranged(paired(messages), limits)
    assert arranged(paired(found), limits) == found


@given(conversations())
def test_each_result_follows_its_call_in_the_calls_order(messages: list[dict[str, Any]]) -> None:
    found = paired(messages)
    for at, message in enumerate(found):
        ids = [c["id"] for c in message.get("tool_calls", ())]
        behind = found[at + 1 : at + 1 + len(ids)]
        if ids and behind:
            assert [m.get("tool_call_id") for m in behind] == ids
    n_results = sum(len(m.get("tool_calls", ())) for m in found[:-1])
    assert sum(m["role"] == "tool" for m in found) in (
        n_results,
        n_results + len(found[-1].get("tool_calls", ())),
    )


def test_results_are_found_by_id_then_by_place() -> None:
    asked = call("x", "y")
    assert paired([asked, result("y", "2"), result("x", "1")]) == [
        asked, result("x", "1"), result("y", "2")
    ]  # fmt: skip
    assert paired([asked, result("?", "1"), result(None, "2")]) == [
        asked, result("x", "1"), result("y", "2")
    ]  # fmt: skip
    again = [call("x"), result("x", "1"), call("x"), result("x", "2")]
    assert paired(again) == again
    apart = [call("x"), call("y"), result("x", "1"), result("y", "2")]
    assert paired(apart) == [apart[0], apart[2], apart[1], apart[3]]
    late = [call("x"), user(), result("x", "1")]
    assert paired(late) == [late[0], late[2], late[1]]


def test_a_call_without_a_result_gets_one_and_a_result_without_a_call_is_the_users() -> None:
    assert paired([call("x"), user()]) == [call("x"), result("x", NO_RESULT), user()]
    assert paired([user(), call("x")]) == [user(), call("x")]
    (orphan,) = paired([result("x", "1")])
    assert orphan == user('{"tool_result": {"tool_call_id": "x", "content": "1"}}')


ALTERNATE = TurnLimits(
    frozenset({("user", "user"), ("answer", "answer"), ("answer", "call"), ("start", "answer"),
               ("result", "user")}), "first", empty_answer=False, filler=" ",
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([system(), system("t"), user()], [system("s\n\nt"), user()]),
        ([user(), answer(), user("v"), system()], [user(), answer(), user("v\n\ns")]),
        ([user(), answer(), system(), user("v")], [user(), answer(), user("s\n\nv")]),
        ([user(), system(), answer()], [user("u\n\ns"), answer()]),
        ([user(), user("v")], [user("u\n\nv")]),
        ([answer(), user()], [user(""), answer(), user()]),
        ([user(), answer(""), user("v")], [user("u\n\nv")]),
        ([user(), answer(), answer("b"), user()], [user(), answer("a\n\nb"), user()]),
        ([user(), answer(), call("x")], [user(), call("x", content="a")]),
        (
            [user(), call("x"), result("x", "1"), user()],
            [user(), call("x"), result("x", "1"), answer(" "), user()],
        ),
    ],
)
def test_a_template_whose_roles_alternate(given: Any, expected: Any) -> None:
    assert arranged(paired(given), ALTERNATE) == expected


def test_calls_are_told_one_by_one_and_apart_from_text() -> None:
    single = TurnLimits(several_calls=False)
    both = [call("x", "y", content="I look."), result("x", "1"), result("y", "2")]
    assert arranged(both, single) == [
        call("x", content="I look."), result("x", "1"), call("y"), result("y", "2")
    ]  # fmt: skip
    assert arranged(both[:1], single) == [
        call("x", content="I look."), result("x", NO_RESULT), call("y")
    ]  # fmt: skip
    apart = TurnLimits(content_with_calls=False)
    assert arranged(both, apart) == [answer("I look."), call("x", "y"), *both[1:]]
    one = TurnLimits(reasoning_with_both=False)
    (found,) = arranged([{**both[0], "reasoning_content": "Hm."}], one)
    assert (found["reasoning_content"], found["content"]) == ("Hm.\n\nI look.", "")


@given(conversations(), LIMITS)
def test_a_longer_conversation_begins_as_the_shorter_one(
    messages: list[dict[str, Any]], limits: TurnLimits
) -> None:
    """Else its prompt would be read again from the first difference on."""
    before = paired(messages)
    longer = [*before, answer("the answer"), user("and")]
    assume(before[-1]["role"] != "assistant")  # its results or more of it would come first
    assume(not limits.needs_user or any(m["role"] == "user" for m in before))
    short, long = arranged(before, limits), arranged(longer, limits)
    assert long[: len(short)] == short


@given(st.text(max_size=20))
def test_ids_get_the_length_that_a_template_requires(given: str) -> None:
    needs = TemplateNeeds(takes_calls=True, takes_results=True, id_length=9)
    called, told = in_form([call(given or "x"), result(given or "x", "1")], needs)
    (found,) = called["tool_calls"]
    assert found["id"] == told["tool_call_id"]
    assert len(found["id"]) == 9
    assert found["id"].isalnum()
    (again,) = in_form([call(found["id"])], needs)
    assert again["tool_calls"][0]["id"] == found["id"]


def test_two_ids_stay_two() -> None:
    needs = TemplateNeeds(takes_calls=True, id_length=9)
    ids = [f"toolu_{n}" for n in range(500)]
    (found,) = in_form([call(*ids)], needs)
    assert len({c["id"] for c in found["tool_calls"]}) == len(ids)


WHOLE = '{"city": "Zürich \\"x\\"", "days": [1, {"a": null}], "x": -1.5e3}'


@pytest.mark.parametrize("n", range(len(WHOLE)))
def test_arguments_that_the_token_limit_cut_are_an_object(n: int) -> None:
    (called,) = call("x", arguments=WHOLE[:n])["tool_calls"]
    found = arguments_of(called)
    assert isinstance(found, dict)
    if n > WHOLE.index("x"):
        assert found["city"].startswith("Zürich")
    for needs in (TemplateNeeds(), TemplateNeeds(arguments_as_object=True)):
        in_form([call("x", arguments=WHOLE[:n])], needs)


def test_arguments_that_are_no_object_are_kept_as_one() -> None:
    for text, value in (("hello", "hello"), ("[1]", [1]), ("3", 3), ('"x', "x")):
        (called,) = call("x", arguments=text)["tool_calls"]
        assert arguments_of(called) == {"arguments": value}
    assert arguments_of({"function": {"name": "f", "arguments": " "}}) == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_call_without_text_is_one_turn_however_its_content_is_empty(name: str) -> None:
    """DeepSeek's template of the distilled models writes a second turn for the text "" ."""
    call = {"id": "call_00001", "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}  # fmt: skip
    prompts = set()
    for empty in ({"content": None}, {"content": ""}, {}):
        answer = {"role": "assistant", "tool_calls": [call], **empty}
        result = {"role": "tool", "tool_call_id": "call_00001", "content": "rain"}
        asked = Conversation(({"role": "user", "content": "hi"}, answer, result), (WEATHER,))
        prompts.add(chat_format(name).prepare(asked).text)
    [prompt] = prompts
    if "R1-Distill" in name:
        assert prompt.count("<｜Assistant｜>") == 1
