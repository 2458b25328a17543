"""Reads the images of a request: their sizes first, then, if the prompt fits, their pixels.

Nothing here waits for the engine's steps except the count of tokens, and the engine never waits for
a decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import BadRequest
from offload.images.decoding import Bitmap, DecodedImage
from specoffload.server.api.images import OMITTED, TakenImage, chosen
from specoffload.server.engine.calls import check_fits
from specoffload.server.engine.client import EngineClient
from specoffload.server.image_decoding import DecodingGate, image_pixels, image_sizes
from specoffload.session.images import PromptImages, without_images


@dataclass(frozen=True)
class ImageText:
    """A prompt's text, in which `marker` stands for each image that is not left out.

    `ends` are numbers of its characters. `left_out` are names of images that could not be read.
    """

    text: str
    marker: str
    ends: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()

    def without(self, names: dict[int, str]) -> ImageText:
        """Return the text without the images of these numbers."""
        text, ends = without_images(self.text, self.marker, names, OMITTED, self.ends)
        return ImageText(text, self.marker, ends, (*self.left_out, *names.values()))


RequestImages = Sequence[tuple[ImageText, Sequence[TakenImage]]]
"""The prompts of a request, each with its images."""


class ImageReader:
    """Reads images for all requests of a server."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine, self._gate = engine, DecodingGate()

    async def sized(
        self, prompt: ImageText, images: Sequence[TakenImage], decoder: Path
    ) -> tuple[ImageText, PromptImages | None]:
        """Return the prompt and the sizes of its images, without those that cannot be read.

        Raises BadRequest if one of them is needed.
        """
        ((prompt, _, sizes),) = await _sized([(prompt, images)], decoder)
        return prompt, PromptImages(prompt.marker, tuple(sizes)) if sizes else None

    async def read(
        self, wanted: RequestImages, decoder: Path, client: str, *, add_special: bool
    ) -> list[tuple[ImageText, PromptImages | None]]:
        """Return each prompt of a request with those of its images that could be read.

        Raises BadRequest if an image that is needed cannot be read, and RequestFailed if a prompt
        does not fit the context, before an image is decoded.
        """
        sized = await _sized(wanted, decoder)
        for prompt, _, sizes in sized:
            known = PromptImages(prompt.marker, tuple(sizes))
            await self._engine.call(check_fits, prompt.text, known, add_special)
        kept = [image for _, images, _ in sized for image in images]
        sizes = [size for _, _, of_prompt in sized for size in of_prompt]
        if not kept:
            return [(prompt, None) for prompt, _, _ in sized]
        # The images that are needed come first, and then the latest ones.
        order = sorted(range(len(kept)), key=lambda at: (bool(kept[at].name), -at))
        decoded, stored = await image_pixels(
            _files([kept[at] for at in order]), [sizes[at] for at in order],
            decoder, self._gate, client,
        )  # fmt: skip
        in_order = iter([decoded[order.index(at)] for at in range(len(kept))])
        result: list[tuple[ImageText, PromptImages | None]] = []
        try:
            for prompt, images, _ in sized:
                text, _, bitmaps = settled(prompt, images, [next(in_order) for _ in images])
                result.append((text, PromptImages(text.marker, tuple(bitmaps), stored.share())))
        except BadRequest:
            stored.close()
            raise
        return result


def needed_images(images: PromptImages) -> list[TakenImage]:
    """Return the files of a raw prompt, none of which can be left out."""
    return [TakenImage("prompt", "", file) for file in images.files if isinstance(file, bytes)]


async def _sized(
    wanted: RequestImages, decoder: Path
) -> list[tuple[ImageText, list[TakenImage], list[Bitmap]]]:
    """Return each prompt, its images and their sizes, without images that have no size.

    Raises BadRequest if one of them is needed, or if the text of a prompt lacks an image.
    """
    given = [(prompt, chosen(images)) for prompt, images in wanted]
    for prompt, images in given:
        PromptImages(prompt.marker, (b"",) * len(images)).parts(prompt.text)
    files = _files([image for _, images in given for image in images])
    sizes = iter(await image_sizes(files, decoder))
    return [
        settled(
            prompt,
            images,
            [image.file if isinstance(image.file, BadRequest) else next(sizes) for image in images],
        )
        for prompt, images in given
    ]


def _files(images: Sequence[TakenImage]) -> list[bytes]:
    return [image.file for image in images if isinstance(image.file, bytes)]


def settled(
    prompt: ImageText, images: Sequence[TakenImage], decoded: Sequence[DecodedImage]
) -> tuple[ImageText, list[TakenImage], list[Bitmap]]:
    """Return the prompt, the images and the bitmaps without what could not be read.

    Raises BadRequest for an image that is needed.
    """
    names: dict[int, str] = {}
    for at, (image, bitmap) in enumerate(zip(images, decoded, strict=True)):
        if isinstance(bitmap, Bitmap):
            continue
        if not image.name:
            words = f"image {at + 1} of {len(images)} cannot be read: {bitmap}"
            raise BadRequest(words) from bitmap
        names[at] = image.name
    kept = [image for at, image in enumerate(images) if at not in names]
    bitmaps = [bitmap for bitmap in decoded if isinstance(bitmap, Bitmap)]
    return prompt.without(names), kept, bitmaps
