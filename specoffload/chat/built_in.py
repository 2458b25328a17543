"""llama.cpp's built-in chat templates as Jinja, by the names of --chat-template.

llama.cpp has them as code (llama_chat_apply_template), which the process that renders templates
does not load. A test compares their output with that of the pinned library.
"""

from __future__ import annotations

import json
import pkgutil

BUILT_IN: dict[str, str] = json.loads(pkgutil.get_data("specoffload.chat", "built_in.json") or "")
CHATML = BUILT_IN["chatml"]
"""For a model whose file has no template."""
