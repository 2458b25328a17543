"""What the parts of a decode agree on, from the batch's tokens to the device. Pure."""

from __future__ import annotations

# Most tokens of a small batch: a decode of one token, or the verification of a draft. The player
# goes through its layers, its routing is recorded, and its times are learned for each size. Larger
# batches are prompts. A draft has at most 63 tokens (`MOST_DRAFTED` in specdec/options.py), because
# its verification also decodes the text's last token.
SMALL_BATCH = 64
