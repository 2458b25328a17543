"""Images in the text of a prompt, where a marker stands for each of them. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from offload.errors import BadRequest


@dataclass(frozen=True)
class PromptImages:
    """Files of images. In the prompt's text, `marker` stands for each of them, in order."""

    marker: str
    files: tuple[bytes, ...]

    def parts(self, text: str) -> list[str | bytes]:
        """Return texts and files in turn. Raises BadRequest if the text lacks an image."""
        texts = text.split(self.marker)
        if len(texts) != len(self.files) + 1:
            raise BadRequest(
                f"the chat template writes {len(texts) - 1} of {len(self.files)} images: put them "
                "into messages of the user, or use another --chat-template"
            )
        parts: list[str | bytes] = [texts[0]]
        for file, after in zip(self.files, texts[1:], strict=True):
            parts += (file, after)
        return [part for part in parts if part != ""]
