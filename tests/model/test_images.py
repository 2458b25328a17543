"""Prompts with images: equal to libmtmd's own evaluation, and hostile files refused."""

from __future__ import annotations

import base64
import ctypes as C
import io
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_parts import KINDS, model_with_projector, png, slow_jpeg
from numpy.typing import NDArray
from resolved import config_of
from typer.testing import CliRunner

from lab.options import engine_options
from lab.synth.mtp import write_mtp
from lab.synth.projector import write_projector
from offload.engine import Engine, open_engine
from offload.errors import BadModel, BadRequest, DoesNotFit, NotSupported
from offload.ggml.library.callback import Pending
from offload.ggml.library.lib import library, mtmd_binding
from offload.images.building import image_library
from offload.images.decoding import decoded_files, decoder_command, decoder_input, found_in
from offload.images.mtmd import ImagePrompt, Projector
from offload.images.place import projector_bytes
from offload.images.place_tokens import image_spans
from offload.model_file import read_facts
from offload.options import ProjectorOptions
from specdec.decoding.drafting import without_images
from specdec.options import OF_TEXT, DrafterName, PolicyName, SpecOptions
from specdec.types import Decision, Draft
from specoffload.chat.conversation import Content, Conversation
from specoffload.chat.format import ChatFormat
from specoffload.cli import app
from specoffload.commands.plan import as_dict
from specoffload.config.options import DiskRoom, Options, PlanOptions
from specoffload.generation.generation import GenerateOptions
from specoffload.opening.planner import Planner
from specoffload.session.chat import answer as chat_answer
from specoffload.session.session import Session

PARTS = ("Look at ", png(150, 90, 1), " and ", png(60, 200, 2), " now tell me")
GREEDY = GenerateOptions(n_predict=12, ignore_eos=True, cache_prompt=True)


@pytest.fixture(scope="module", autouse=True)
def _libmtmd() -> None:
    """Compile libmtmd before the first test's time limit, if this machine has never done so."""
    image_library()


def opened(kind: str, models: Path, device: str, **given: Any) -> Engine:
    model, projector = model_with_projector(kind, models)
    options: dict[str, Any] = {
        **{"n_ctx": 1024, "n_batch": 256, "n_ubatch": 128, "n_threads": 1, "n_threads_batch": 1},
        **{"n_outputs": 8, "projector": ProjectorOptions(projector, "of a test"), **given},
    }
    return open_engine(model, engine_options(device=device, **options))


def read(engine: Engine, prompt: Sequence[int], sequence: int = 0, start: int = 0) -> None:
    """Evaluate the prompt from `start` on, all but its last token."""
    at, end = start, len(prompt) - 1
    for span in image_spans(prompt):
        if span.start >= at:
            if span.start > at:
                engine.sequences.extend_batch([(sequence, prompt[at : span.start], 0)])
            engine.sequences.extend_batch([(sequence, prompt[span.start : span.end], 0)])
            at = span.end
    if at < end:
        engine.sequences.extend_batch([(sequence, prompt[at:end], 0)])


def continued(
    engine: Engine, last: int, sequence: int = 0, n: int = 12
) -> tuple[list[int], NDArray[np.float32]]:
    """Return the `n` likeliest tokens after `last`, and the logits after all of them."""
    found: list[int] = []
    rows = engine.sequences.extend(sequence, [last])[-1]
    for _ in range(n):
        found.append(int(rows.argmax()))
        rows = engine.sequences.extend(sequence, found[-1:])[-1]
    return found, rows


def evaluated_by_libmtmd(engine: Engine, n: int = 12) -> tuple[list[int], NDArray[np.float32]]:
    """Return the same as `continued`, computed by mtmd_helper_eval_chunks in plain libllama."""
    import llama_cpp.llama_cpp as structs
    from llama_cpp import mtmd_cpp

    assert engine.opened.projector is not None
    lib, handle = library(), engine.opened.projector._handle
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 1024, 256, 128
    params.n_threads = params.n_threads_batch = 1
    params.kv_unified = True
    context = lib.llama_init_from_model(engine.model.handle, params)
    files = [part for part in PARTS if isinstance(part, bytes)]
    bitmaps = (C.c_void_p * len(files))()
    for i, file in enumerate(files):
        buffer = (C.c_uint8 * len(file)).from_buffer_copy(file)
        bitmaps[i] = mtmd_cpp.mtmd_helper_bitmap_init_from_buf(handle, buffer, len(file), False)
    text = "".join(part if isinstance(part, str) else "<__media__>" for part in PARTS).encode()
    given = mtmd_cpp.mtmd_input_text(text, len(text), True, True)
    chunks, end = mtmd_cpp.mtmd_input_chunks_init(), structs.llama_pos()
    assert not mtmd_cpp.mtmd_tokenize(handle, chunks, C.byref(given), bitmaps, len(files))
    assert not mtmd_cpp.mtmd_helper_eval_chunks(
        handle, context, chunks, 0, 0, 256, True, C.byref(end)
    )
    batch, found = structs.llama_batch_init(1, 0, 1), []
    batch.n_tokens = batch.n_seq_id[0] = batch.logits[0] = 1
    batch.seq_id[0][0] = 0
    rows = np.ctypeslib.as_array(structs.llama_get_logits_ith(context, -1), (engine.n_vocab,))
    for at in range(n):
        found.append(int(rows.argmax()))
        batch.token[0], batch.pos[0] = found[-1], end.value + at
        assert not structs.llama_decode(context, batch)
        rows = np.ctypeslib.as_array(structs.llama_get_logits_ith(context, 0), (engine.n_vocab,))
    rows = rows.copy()
    mtmd_cpp.mtmd_input_chunks_free(chunks)
    for bitmap in bitmaps:
        mtmd_cpp.mtmd_bitmap_free(bitmap)
    lib.llama_free(context)
    return found, rows


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_libmtmds_own_evaluation(kind: str, device: str, models: Path) -> None:
    """The last token of the prompt is a decode of its own here, so rounding may differ."""
    with opened(kind, models, device) as engine:
        prompt = engine.image_prompt(PARTS, add_special=True)
        assert len(prompt.images) == 2
        assert all(image.is_causal == (kind != "gemma3") for image in prompt.images)
        read(engine, prompt)
        tokens, last = continued(engine, prompt[-1])
        wanted, wanted_last = evaluated_by_libmtmd(engine)
        assert tokens == wanted
        np.testing.assert_allclose(last, wanted_last, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_saved_states_of_images_go_on_alike(kind: str, models: Path) -> None:
    """A text goes on alike in another sequence, from a saved state, and after a cut."""
    with opened(kind, models, "cpu", n_sequences=3) as engine:
        prompt, s = engine.image_prompt(PARTS, add_special=True), engine.sequences
        read(engine, prompt)
        s.share(0, 1, len(prompt) - 1)
        saved = s.save(0)
        s.load(2, saved, prompt[:-1])
        wanted, _ = continued(engine, prompt[-1])
        for sequence in (1, 2):
            found, _ = continued(engine, prompt[-1], sequence)
            assert found == wanted, f"sequence {sequence}"
        if s.can_rewind:
            first, second = image_spans(prompt)
            with pytest.raises(BadRequest, match="inside an image"):
                s.rewind(1, second.start + 1)
            assert s.resumable(1, second.end - 1) == second.start
            for length in (second.end, second.start, first.start):
                s.rewind(1, length)
                read(engine, prompt, 1, length)
                assert continued(engine, prompt[-1], 1)[0] == wanted, f"cut to {length}"


def test_an_image_larger_than_a_batch_is_read_in_parts(models: Path) -> None:
    parts = ("a", png(560, 560, 3), "b")
    found = []
    for n_batch in (512, 96):
        with opened("qwen2vl", models, "cpu", n_batch=n_batch, n_ubatch=64) as engine:
            prompt = engine.image_prompt(parts, add_special=True)
            assert len(prompt.images[0].tokens) == 400
            read(engine, prompt)
            found.append(continued(engine, prompt[-1])[0])
    assert found[0] == found[1]


def test_an_image_that_must_fit_a_ubatch_is_refused_if_it_does_not(models: Path) -> None:
    words = r"takes 16 tokens.*at most 8: raise --ubatch-size"
    with (
        opened("gemma3", models, "cpu", n_ubatch=8, n_batch=64) as engine,
        pytest.raises(DoesNotFit, match=words),
    ):
        engine.image_prompt(PARTS, add_special=True)


def session_of(kind: str, models: Path, **given: Any) -> Session:
    model, projector = model_with_projector(kind, models)
    options = Options(
        model=model, mmproj=projector, device=given.pop("device", "cpu"), ctx_size=1024, threads=1,
        threads_batch=1, use_profile=False,
    )  # fmt: skip
    return Session(replace(config_of(options), **given))


def answer(session: Session, prompt: ImagePrompt, options: GenerateOptions = GREEDY) -> Any:
    pieces = list(session.generate(prompt, options))
    return [token for piece in pieces for token in piece.tokens], pieces[-1].stats


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_answers_as_libmtmd_does_and_finds_images_in_its_caches(
    kind: str, models: Path, tmp_path: Path
) -> None:
    room: dict[str, Any] = {"cache_disk": DiskRoom(1 << 30, tmp_path), "cache_ram_bytes": 1 << 28}
    with session_of(kind, models, **room) as session:
        prompt = session.image_prompt(PARTS, add_special=True)
        wanted, _ = evaluated_by_libmtmd(session.target)
        tokens, stats = answer(session, prompt)
        assert (tokens, stats.n_cached_tokens) == (wanted, 0)
        again, stats = answer(session, session.image_prompt(PARTS, add_special=True))
        assert (again, stats.n_cached_tokens) == (wanted, len(prompt) - 1)
        other = session.image_prompt((*PARTS[:3], png(60, 200, 9), PARTS[4]), add_special=True)
        _, stats = answer(session, other)
        second = image_spans(prompt)[1]
        assert stats.n_cached_tokens == (second.start if session.target.sequences.can_rewind else 0)
        found, stats = answer(session, session.image_prompt(PARTS, add_special=True))
        assert found == wanted
    with session_of(kind, models, **room) as session:
        found, stats = answer(session, session.image_prompt(PARTS, add_special=True))
        assert found == wanted
        assert stats.n_from_disk == (0 if len(prompt) < 128 else len(prompt) - 1)


def test_penalties_and_drafts_leave_images_alone(models: Path) -> None:
    with session_of("qwen2vl", models, parallel=2) as session:
        prompt = session.image_prompt(PARTS, add_special=True)
        wanted, _ = answer(session, prompt)
        options = GenerateOptions(
            n_predict=12, ignore_eos=True, repeat_penalty=1.5, repeat_last_n=-1
        )
        assert answer(session, prompt, options)[0] != wanted
    model, projector = model_with_projector("qwen2vl", models)
    words = Options(
        model=model, mmproj=projector, draft=model, device="cpu", ctx_size=1024, threads=1,
        threads_batch=1, use_profile=False,
    )  # fmt: skip
    with Session(config_of(words)) as session:
        tokens, stats = answer(session, session.image_prompt(PARTS, add_special=True))
        assert (tokens, stats.n_drafted) == (wanted, 0)
        text = session.tokenize("Look at this and tell me", add_special=True, parse_special=False)
        _, stats = answer(session, ImagePrompt(text, ()))
        assert stats.n_drafted > 0


def test_two_requests_share_steps_while_one_reads_an_image(models: Path) -> None:
    with session_of("qwen2vl", models, parallel=2) as session:
        texts = [
            session.image_prompt(PARTS, add_special=True),
            session.image_prompt(
                ("hi", png(200, 100, 5), " what is this, and why?"), add_special=True
            ),
        ]
        alone = [answer(session, text)[0] for text in texts]
        session.forget()
        requests = [session.start(text, GREEDY) for text in texts]
        while not session.is_idle:
            session.step()
        together = [r.history[r.n_prompt :] for r in requests]
        assert [text[:4] for text in together] == [text[:4] for text in alone]


def test_a_chat_with_an_image_is_answered(models: Path) -> None:
    def content(file: bytes) -> list[dict[str, Any]]:
        url = "data:image/png;base64," + base64.b64encode(file).decode()
        return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "so?"}]

    def said(file: bytes) -> tuple[int, str]:
        asked = Conversation(({"role": "user", "content": content(file)},))
        n_prompt, parts = chat_answer(session, ChatFormat.of(None), asked, GREEDY)
        return n_prompt, "".join(part.text for part in parts if isinstance(part, Content))

    with session_of("qwen2vl", models) as session:
        n_prompt, text = said(PARTS[1])  # type: ignore[arg-type]
        assert n_prompt > 15
        assert text
        assert said(png(150, 90, 8)) == (n_prompt, said(png(150, 90, 8))[1])
        with pytest.raises(BadRequest, match="image 1 of 1 cannot be read"):
            said(b"no image")


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_plan_counts_the_projector_where_a_start_puts_it(device: str, models: Path) -> None:
    """The count is an estimate of the most, so what opening it takes is less."""
    model, projector = model_with_projector("qwen2vl", models)
    wanted = projector_bytes(projector.stat().st_size)
    asked = Options(
        model=model, mmproj=projector, device=device, ctx_size=512, threads=1, use_profile=False
    )
    asked_config = config_of(asked)
    shown = as_dict(Planner(asked_config, asked_config.spec, PlanOptions()).planned(512))
    counted = shown["reserve"]["projector_bytes"], shown["host_projector_bytes"]
    assert counted == ((wanted, 0) if device == "cpu" else (0, wanted))
    if device == "cpu":
        assert shown["reserve_bytes"] == sum(shown["reserve"].values())
    with Session(config_of(asked)) as session:
        options = session.target.start.options
        assert options.projector is not None
        assert options.projector.on_cpu_reason == "no GPU computes"
        own = options.wanted
        assert (own.projector_bytes, own.host_projector_bytes) == counted
        before_bytes = psutil.Process().memory_info().rss
        again = Projector(
            projector, mtmd_binding(image_library().folder), session.target.model, Pending(),
            device=None, n_threads=1,
        )  # fmt: skip
        grown_bytes = psutil.Process().memory_info().rss - before_bytes
        again.close()
        assert grown_bytes < wanted


@pytest.mark.parametrize("vram_gib", [24, 2])
def test_a_plan_for_another_gpu_counts_the_projector_by_its_memory(
    vram_gib: int, models: Path
) -> None:
    model, projector = model_with_projector("qwen3.5-35b-a3b", models)
    words = [str(model), "--mmproj", str(projector), "--vram", f"{vram_gib}GiB", "--ram", "64GiB"]
    done = CliRunner().invoke(app, ["plan", *words, "--json"], catch_exceptions=False)
    shown = json.loads(done.stdout)
    counted = shown["reserve"]["projector_bytes"], shown["host_projector_bytes"]
    wanted = projector_bytes(projector.stat().st_size)
    on_gpu = vram_gib == 24
    assert counted == ((wanted, 0) if on_gpu else (0, wanted))
    printed = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False).stdout
    row = r"projector of images[^:\d]+0.5 GiB" if on_gpu else "projector of images: 0.5 GiB of RAM"
    assert re.search(row, printed)


# -- files


def test_bad_projectors_end_the_start_in_one_sentence(models: Path, tmp_path: Path) -> None:
    model, projector = model_with_projector("qwen2vl", models)
    _, other = model_with_projector("qwen3.5-35b-a3b", models)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(projector.read_bytes()[:2000])
    for file, words in (
        (other, "mismatch between text model"),
        (model, "libmtmd refuses this projector"),
        (cut, "libmtmd refuses this projector"),
    ):
        with pytest.raises(BadModel, match=words):
            opened("qwen2vl", models, "cpu", projector=ProjectorOptions(file, "of a test"))
    with pytest.raises(BadModel, match="No such file"):
        Session(config_of(Options(model=model, mmproj=tmp_path / "none.gguf", device="cpu")))


def test_a_model_that_aborts_on_images_is_refused_at_the_start(models: Path) -> None:
    model, projector = write_mtp(models, "glm4moe"), models / "glm4moe-mmproj.gguf"
    write_projector(projector, "qwen2.5vl_merger", read_facts(model).number("embedding_length"))
    words = ["-m", str(model), "--mmproj", str(projector), "--device", "cpu", "-p", "x", "-n", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "specoffload", "run", *words, "-c", "512", "-no-cnv"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"specoffload: cannot open {model}, the library stopped at an assertion")
    assert "does not support multimodal" in last


def test_without_a_projector_images_are_refused_in_llama_servers_words(models: Path) -> None:
    with (
        opened("qwen2vl", models, "cpu", projector=None) as engine,
        pytest.raises(NotSupported, match="image input is not supported - hint"),
    ):
        engine.image_prompt(PARTS, add_special=True)


HOSTILE = {
    "bomb": (png(9000, 9000, None), "9000 x 9000 pixels, and at most"),
    "line": (png(1, 100_000, None), "1 x 100000 pixels, and one side may be at most 200"),
    "truncated": (png(150, 90)[:200], "damaged or cut off"),
    "text": (b"hello", "no image of a known type"),
    "nothing": (b"", "empty"),
    "webp": (b"RIFF\0\0\0\0WEBPVP8 ", "WebP"),
    "wav": (b"RIFF\0\0\0\0WAVEfmt ", "a sound file"),
    "mp3": (b"ID3\3" + bytes(50), "a sound file"),
    "mp3 without a tag": (b"\xff\xfb\x90\0" + bytes(50), "a sound file"),
    "flac": (b"fLaC" + bytes(50), "a sound file"),
    "photoshop": (b"8BPS\0\1" + bytes(30), "a Photoshop file"),
    "tga": (
        bytes((0, 0, 2)) + bytes(9) + struct.pack("<HHBB", 2, 2, 24, 0) + bytes(12),
        "no image",
    ),
    "tiff": (b"II*\0" + bytes(30), "a TIFF file"),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(30), "a HEIC file"),
    "svg": (b" <svg xmlns='http://www.w3.org/2000/svg'/>", "an SVG file"),
    "html": (b"<!DOCTYPE html><html>404</html>", "an HTML page"),
    "pnm": (b"P6\n2 2\n255\n" + bytes(12), "no image of a known type"),
    "noise": (np.random.default_rng(0).bytes(5000), "no image of a known type"),
    "jpeg noise": (b"\xff\xd8\xff\xe0" + np.random.default_rng(0).bytes(5000), "no image|damaged"),
    "gif noise": (b"GIF89a\x10\0\x10\0" + np.random.default_rng(0).bytes(5000), "damaged|no image"),
    "bmp noise": (b"BM" + b"\xff" * 60, "no image|damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_gets_one_sentence(name: str) -> None:
    file, words = HOSTILE[name]
    with pytest.raises(BadRequest, match=words) as refused:
        decoded_files([png(10, 10), file], image_library().decoder)
    assert str(refused.value).startswith("image 2 of 2 cannot be read: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(10))
def test_photos_are_turned_as_their_exif_data_says(kind: str, orientation: int) -> None:
    """Pillow turns the same file. 0 and 9 are no orientations."""
    pixels = np.random.default_rng(0).integers(0, 256, (5, 9, 3), np.uint8)
    exif, file = PIL.Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    shown = PIL.Image.fromarray(pixels).resize((90, 50))
    shown.save(file, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))
    (bitmap,) = decoded_files([file.getvalue()], image_library().decoder)
    wanted = PIL.ImageOps.exif_transpose(PIL.Image.open(file)).convert("RGB")
    assert (bitmap.width, bitmap.height) == wanted.size
    found = np.frombuffer(bitmap.pixels, np.uint8).reshape(bitmap.height, bitmap.width, 3)
    difference = np.abs(found.astype(int) - np.asarray(wanted).astype(int))
    assert difference.max() <= (6 if kind == "JPEG" else 0)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "GIF", "colour"])
def test_transparent_pixels_become_white(mode: str) -> None:
    """The colours below them are what programs leave there, and nobody sees them."""
    file, rng = io.BytesIO(), np.random.default_rng(1)
    if mode in ("RGBA", "LA"):
        pixels = rng.integers(0, 256, (6, 8, 4), np.uint8)
        PIL.Image.fromarray(pixels).convert(mode).save(file, "PNG")
    else:
        numbers = PIL.Image.fromarray(rng.integers(0, 4, (6, 8), np.uint8), "P")
        numbers.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9])
        if mode == "colour":
            numbers.convert("RGB").save(file, "PNG", transparency=(0, 255, 0))
        else:
            numbers.save(file, "PNG" if mode == "P" else "GIF", transparency=1)
    shown = PIL.Image.open(file).convert("RGBA")
    white = PIL.Image.new("RGBA", shown.size, (255, 255, 255, 255))
    wanted = np.asarray(PIL.Image.alpha_composite(white, shown).convert("RGB")).astype(int)
    (bitmap,) = decoded_files([file.getvalue()], image_library().decoder)
    found = np.frombuffer(bitmap.pixels, np.uint8).reshape(wanted.shape).astype(int)
    assert np.abs(found - wanted).max() <= 1


@given(st.binary(max_size=200), st.booleans())
@settings(deadline=None, max_examples=50)
def test_any_exif_data_leaves_an_image_readable(data: bytes, is_little: bool) -> None:
    start = b"II*\0\x08\0\0\0" if is_little else b"MM\0*\0\0\0\x08"
    exif = b"\xff\xe1" + struct.pack(">H", 2 + 6 + 8 + len(data)) + b"Exif\0\0" + start + data
    file = io.BytesIO()
    PIL.Image.new("RGB", (8, 6)).save(file, "JPEG")
    jpeg = file.getvalue()
    (bitmap,) = decoded_files([jpeg[:2] + exif + jpeg[2:]], image_library().decoder)
    assert {bitmap.width, bitmap.height} == {8, 6}


def decoder_says(files: Sequence[bytes], *limits_s: float, sizes: bool = False) -> list[str]:
    """Return what the decoder says of each file: its size, or a refusal. No clock ends it."""
    with tempfile.TemporaryFile() as pixels:
        descriptor = None if sizes else pixels.fileno()
        said = subprocess.run(
            decoder_command(image_library().decoder, descriptor, *limits_s),
            input=b"".join(decoder_input(files)), stdout=subprocess.PIPE, check=True,
            pass_fds=() if descriptor is None else (descriptor,),
        ).stdout  # fmt: skip
    images = found_in(said, files)
    return [str(i) if isinstance(i, BadRequest) else f"{i.width} x {i.height}" for i in images]


def test_all_images_of_a_call_share_one_limit_of_processor_time() -> None:
    """The slow one would take minutes. It uses up the time, so later ones are not begun."""
    small, slow = png(10, 10), slow_jpeg(200_000)
    assert decoder_says([small, slow, small, slow], 0.5, 0.75) == [
        "10 x 10", "decoding it takes over 0.5 s of processor time",
        *["decoding the images of the request takes over 0.75 s of processor time"] * 2,
    ]  # fmt: skip


def test_all_images_of_a_call_share_one_limit_of_pixels() -> None:
    *read, refused = decoder_says([png(7000, 7000, None)] * 5, sizes=True)
    assert read == ["7000 x 7000"] * 4
    assert refused.startswith("the images of a request may have 200000000 pixels together")


def test_pixels_are_those_of_the_file() -> None:
    file = png(7, 5, 4)
    (bitmap,) = decoded_files([file], image_library().decoder)
    wanted = np.random.default_rng(4).integers(0, 256, (5, 21), np.uint8)
    assert (bitmap.width, bitmap.height, bitmap.pixels) == (7, 5, wanted.tobytes())


@pytest.mark.parametrize("kind", ["JPEG", "GIF", "BMP", "PNG"])
def test_files_of_each_type_are_decoded(kind: str) -> None:
    """Pillow decodes the same file; JPEG decoders round differently."""
    pixels = np.add.outer(np.arange(60) * 3, np.arange(80) * 2).astype(np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).convert("RGB").save(file, kind)
    (bitmap,) = decoded_files([file.getvalue()], image_library().decoder)
    wanted = np.asarray(PIL.Image.open(file).convert("RGB")).astype(int)
    found = np.frombuffer(bitmap.pixels, np.uint8).reshape(wanted.shape).astype(int)
    assert np.abs(found - wanted).max() <= (4 if kind == "JPEG" else 0)


@given(st.sampled_from(["JPEG", "GIF", "BMP", "PNG"]), st.data())
@settings(deadline=None)
def test_a_damaged_file_is_decoded_or_refused_in_one_sentence(
    kind: str, data: st.DataObject
) -> None:
    file = io.BytesIO()
    PIL.Image.fromarray(np.arange(48 * 3, dtype=np.uint8).reshape(6, 8, 3)).save(file, kind)
    damaged = bytearray(file.getvalue())
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(1, len(damaged)))
    with suppress(BadRequest):
        (bitmap,) = decoded_files([bytes(damaged[:end])], image_library().decoder)
        assert len(bitmap.pixels) == 3 * bitmap.width * bitmap.height > 0


def test_the_smallest_and_the_longest_images_are_answered(models: Path) -> None:
    with session_of("qwen2vl", models) as session:
        for size in ((1, 1), (200, 1), (1, 200), (3, 600)):
            prompt = session.image_prompt(("a", png(*size), "b"), add_special=True)
            assert len(answer(session, prompt)[0]) == 12


@pytest.mark.parametrize("drafters", [(DrafterName.MTP,), (*OF_TEXT, DrafterName.MTP)])
@pytest.mark.parametrize("architecture", ["qwen35moe", "mimo2"])
def test_drafts_by_the_models_own_layers_and_the_text_change_no_text_with_images(
    architecture: str, drafters: tuple[DrafterName, ...], models: Path
) -> None:
    model = write_mtp(models, architecture)
    n_embd = read_facts(model).number("embedding_length")
    projector = write_projector(
        models / f"mtp-{architecture}-mmproj.gguf", "qwen2.5vl_merger", n_embd
    )
    found, n_drafted = [], []
    for names in (drafters, (DrafterName.NONE,)):
        options = Options(
            model=model, mmproj=projector, device="cpu", ctx_size=1024, threads=1,
            threads_batch=1, use_profile=False,
            spec=SpecOptions(drafters=names, policy=PolicyName.FIXED),
        )  # fmt: skip
        with Session(replace(config_of(options), parallel=2)) as session:
            # The text repeats what comes before the image, so drafters of text look behind it.
            with_image = session.image_prompt(
                ("Look at ", png(150, 90, 1), " now. Look at "), add_special=True
            )
            span = image_spans(with_image)[0]
            # The second prompt differs from the first one right after the image.
            changed = ImagePrompt([*with_image[: span.end], 7, 8, 9], with_image.images)
            longer = GenerateOptions(n_predict=48, ignore_eos=True)
            answers = [answer(session, p, longer) for p in (with_image, changed, with_image)]
            found.append([tokens for tokens, _ in answers])
            n_drafted.append(sum(stats.n_drafted for _, stats in answers))
    assert found[0] == found[1]
    assert n_drafted[0] > 0 == n_drafted[1]


def test_a_draft_that_copies_an_image_is_cut_before_it() -> None:
    decision = Decision(4, "of a test")
    draft = Draft((5, 6, -9, 7), (0.9, 0.8, 0.7, 0.6), "ngram", decision, ((8, 0.1),))
    assert without_images(draft).tokens == (5, 6)
    assert without_images(draft).dropped == ()
    later = Draft((5, 6), (0.9, 0.8), "ngram", decision, ((7, 0.5), (-9, 0.1), (8, 0.1)))
    assert without_images(later).tokens == (5, 6)
    assert without_images(later).dropped == ((7, 0.5),)
    whole = Draft((5, 6), (0.9, 0.8), "ngram", decision)
    assert without_images(whole) is whole
